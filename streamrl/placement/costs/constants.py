"""What a model gets of its devices and links: every figure that a cost rests on, by name.

Nothing else in the cost model is a number of its own. `streamrl calibrate` fits some of these to a
run that was measured; a file may set any of them.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from streamrl.errors import ConfigError
from streamrl.files.bounded_read import read_small_yaml
from streamrl.files.typed_settings import describe_read_error, read_settings
from streamrl.placement.clusters import Cluster

POSITIVE_FRACTIONS = (
    "train_flops_fraction",
    "forward_flops_fraction",
    "decode_flops_fraction",
    "decode_memory_fraction",
    "optimizer_memory_fraction",
    "link_fraction",
    "network_fraction",
    "host_fraction",
)
"""Parts of what a maker states; nothing can be divided by 0."""
FRACTION_NAMES = (
    *POSITIVE_FRACTIONS,
    "zero_exposed_fraction",
    "pause_fraction",
    "memory_reserve_fraction",
)


UPPER_BOUNDS = {
    **dict.fromkeys(FRACTION_NAMES, 1.0),
    # Seconds: of a layer or a hop, of a token's decode step, and of what is there once a batch, a
    # rollout, an update or a version.
    **dict.fromkeys(("collective_s", "link_hop_s", "network_hop_s"), 1.0),
    **dict.fromkeys(("decode_layer_s", "expert_layer_s"), 1.0),
    **dict.fromkeys(("decode_step_s", "decode_rollout_s", "decode_group_s", "hop_s"), 60.0),
    **dict.fromkeys(("begin_s", "between_steps_s"), 3600.0),
    **dict.fromkeys(("micro_batch_s", "update_s", "round_s", "train_step_s"), 3600.0),
    **dict.fromkeys(("score_batch_s", "score_rollout_s"), 3600.0),
    **dict.fromkeys(("rule_group_s", "rule_rollout_s"), 3600.0),
    **dict.fromkeys(("publish_s", "pull_s", "switch_s"), 3600.0),
    # Widths and numbers of things.
    "half_width": 1e6,
    "max_running": 1e6,
    "expert_rows": 1e6,
    "stage_micro_batches": 1e3,
    "score_tokens": 1e9,
    # Bytes: of an element, of a parameter, and of a token.
    **dict.fromkeys(("weight_bytes", "gradient_bytes", "reduced_bytes"), 64.0),
    **dict.fromkeys(("served_bytes", "kv_bytes", "optimizer_bytes"), 64.0),
    **dict.fromkeys(("activation_bytes", "checkpoint_bytes", "logit_bytes"), 1e3),
    "column_bytes": 1e6,
    # Yes or no.
    **dict.fromkeys(("recompute", "offloads_optimizer", "offloads_weights"), 1.0),
    **dict.fromkeys(("keeps_served", "aliases_served", "keeps_kv"), 1.0),
}
"""Of each constant, far above what any device needs: beyond it is a slip, as of a unit."""


@dataclass(frozen=True)
class CostConstants:
    """Calibratable. The defaults of generation show what arXiv:2409.19256 published of A100s in
    2024 (its Figure 15); engines since then have hosts that do less for each rollout.

    Matrix products. A device reaches part of its FLOP/s, less where tensor parallelism or a small
    model leaves it narrow matrices: with a width w = hidden / t the part is fraction * w /
    (w + half_width).
    train_flops_fraction: forward and backward, communication and bubbles not counted.
    forward_flops_fraction: prefill and scoring. decode_flops_fraction: a decode step.
    recompute: whether a backward pass first computes the forward one again.

    Memory and links. decode_memory_fraction: of a device's bandwidth, to read weights and keys and
    values. optimizer_memory_fraction: likewise, to update. link_fraction, network_fraction: of
    bandwidth within a node and between nodes; host_fraction: likewise, to a device's host.
    collective_s: a collective of any size, once;
    link_hop_s, network_hop_s: for each of its hops.

    Generation. max_running: most rollouts a replica samples at the same time. decode_step_s,
    decode_layer_s, decode_rollout_s: the host's own work for a decode step, for each layer of it,
    and for each rollout in it; decode_group_s: for each group that is done. begin_s: from a prompt
    in the queue to its place in the engine.

    Training. micro_batch_s, update_s, train_step_s: on top of each micro-batch, update and step.
    round_s: before each micro-batch and each update, to ask for it.
    zero_exposed_fraction: of ZeRO's traffic in a micro-batch, what no computation hides.
    expert_layer_s: the host's work for a layer with experts, of a forward pass over a micro-batch
    or a batch that is scored: it sorts tokens and waits for how many go where. expert_rows: of
    products of experts, in blocks of so many; an expert's last one is half empty on average.
    stage_micro_batches: into how many micro-batches, for each of its stages, a pipeline divides
    what it is given, if rollouts are that many; it is more where they would be too large.

    Scoring. score_batch_s, score_rollout_s: on top of a batch, and of each rollout. score_tokens:
    most tokens in a batch. rule_group_s, rule_rollout_s: of a reward that is a rule.

    Versions. publish_s, pull_s: on top of the bytes, for who is elsewhere; switch_s: for who shares
    devices with the trainer. pause_fraction: of a pull, how much of it stops who pulls.

    The stream. hop_s: from one stage to the next. between_steps_s: for the books. column_bytes: of
    a rollout's token, all columns.

    Rest. Of calls that share devices with others, what is on the host while it rests, and moves to
    a device and back once a step. offloads_optimizer: the optimizer's state. offloads_weights: of
    what is trained, its weights, too, and gradients are let go; of what only computes forward, its
    weights, which need not go back.

    Bytes. weight_bytes, gradient_bytes, optimizer_bytes: of a parameter that is trained; master
    weights belong to the last. reduced_bytes: of a gradient under way. activation_bytes: of a
    token, for each layer and each element of the hidden width; checkpoint_bytes: likewise, where
    the rest is computed again. logit_bytes: of a token, for each entry of the vocabulary.
    served_bytes: of a weight that only computes forward. kv_bytes: of an element of keys and
    values. keeps_served: whether weights that follow those of a trainer on the same devices stay
    while it trains; if not, each version fills them anew. aliases_served: whether they lie in the
    trainer's own memory as far as layouts coincide; if not, they are a copy. keeps_kv: whether keys
    and values stay while others train on their devices. memory_reserve_fraction: of a device, what
    libraries and fragments take.
    """

    train_flops_fraction: float = 0.6
    forward_flops_fraction: float = 0.65
    decode_flops_fraction: float = 0.5
    half_width: float = 256.0
    recompute: bool = True

    decode_memory_fraction: float = 0.7
    optimizer_memory_fraction: float = 0.7
    link_fraction: float = 0.7
    network_fraction: float = 0.8
    host_fraction: float = 0.8
    collective_s: float = 5e-6
    link_hop_s: float = 20e-6
    network_hop_s: float = 30e-6

    max_running: int = 256
    decode_step_s: float = 4e-3
    decode_layer_s: float = 0.0
    decode_rollout_s: float = 100e-6
    decode_group_s: float = 0.0
    begin_s: float = 10e-3

    micro_batch_s: float = 20e-3
    update_s: float = 50e-3
    round_s: float = 0.0
    train_step_s: float = 0.2
    zero_exposed_fraction: float = 0.5
    expert_layer_s: float = 0.0
    expert_rows: int = 64
    stage_micro_batches: int = 2

    score_batch_s: float = 20e-3
    score_rollout_s: float = 100e-6
    score_tokens: int = 32768
    rule_group_s: float = 1e-3
    rule_rollout_s: float = 1e-3

    publish_s: float = 0.1
    pull_s: float = 0.2
    switch_s: float = 0.1
    pause_fraction: float = 1.0

    hop_s: float = 5e-3
    between_steps_s: float = 0.05
    column_bytes: float = 40.0

    offloads_optimizer: bool = False
    offloads_weights: bool = False

    weight_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    reduced_bytes: int = 4
    activation_bytes: float = 34.0
    checkpoint_bytes: float = 2.0
    logit_bytes: float = 8.0
    served_bytes: int = 2
    kv_bytes: int = 2
    keeps_served: bool = False
    aliases_served: bool = True
    keeps_kv: bool = False
    memory_reserve_fraction: float = 0.15

    def __post_init__(self) -> None:
        for field in fields(self):
            value = vars(self)[field.name]
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{field.name}={value}: must be finite")
            if value < 0 or (field.name in POSITIVE_FRACTIONS and value == 0):
                least = "above 0" if field.name in POSITIVE_FRACTIONS else "0 or more"
                raise ConfigError(f"{field.name}={value}: must be {least}")
            if value > UPPER_BOUNDS[field.name]:
                shown = f"{value!s:.40}"
                raise ConfigError(
                    f"{field.name}={shown}: must be at most {UPPER_BOUNDS[field.name]:g}"
                )
        for name in ("max_running", "score_tokens", "stage_micro_batches"):
            if vars(self)[name] < 1:
                raise ConfigError(f"{name}={vars(self)[name]}: must be at least 1")

    @classmethod
    def from_cluster(cls, cluster: Cluster) -> "CostConstants":
        """The defaults for the devices of a cluster: CPU's where any of them is one."""
        return CPU_CONSTANTS if cluster.is_cpu else cls()

    @classmethod
    def from_yaml(cls, path: Path, defaults: "CostConstants | None" = None) -> "CostConstants":
        """Those of a YAML file; what it does not name is as in `defaults`. Raises ConfigError."""
        try:
            found = read_small_yaml(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"constants {path}: {describe_read_error(error)}") from None
        if not isinstance(found, Mapping):
            raise ConfigError(f"constants {path}: must be a mapping of names to numbers")
        return cls.from_dict(found, defaults, place=f"constants {path}")

    @classmethod
    def from_dict(
        cls, loose: Mapping[str, Any], defaults: "CostConstants | None" = None, *, place: str
    ) -> "CostConstants":
        """Those of a mapping, likewise. Raises ConfigError with `place` and the nearest name."""
        return read_settings(cls, asdict(defaults or cls()) | dict(loose), section=place)

    def to_dict(self) -> dict[str, Any]:
        """As plain values; `from_dict` is the inverse."""
        return asdict(self)

    def write_yaml(self, path: Path) -> None:
        """Write them as YAML; `read` is the inverse."""
        path.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False))


CPU_CONSTANTS = CostConstants(
    train_flops_fraction=0.3,
    forward_flops_fraction=0.3,
    decode_flops_fraction=0.3,
    half_width=64.0,
    recompute=False,
    collective_s=200e-6,
    link_hop_s=50e-6,
    network_hop_s=200e-6,
    weight_bytes=4,
    reduced_bytes=4,
    served_bytes=4,
    kv_bytes=4,
    keeps_served=True,
)
"""A core's: slower to begin anything, and float32 throughout."""
