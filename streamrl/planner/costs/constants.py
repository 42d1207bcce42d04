"""Constants of the cost model: achieved fractions of peak speeds, overheads and bytes, by name.

The cost model has no numbers besides these. `streamrl calibrate` fits some of them to a measured
run; a YAML file may set any.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError
from streamrl.files.bounded_read import read_small_yaml, wrap_file_errors
from streamrl.files.typed_settings import read_settings
from streamrl.placement.clusters import Cluster

OPTIMIZER_MEMORY_FRACTION = 0.7
"""Achieved fraction of memory bandwidth in an optimizer step."""
HOST_FRACTION = 0.8
"""Achieved fraction of bandwidth between device and host."""
ZERO_EXPOSED_FRACTION = 0.5
"""Fraction of ZeRO's traffic in a micro-batch that computation does not hide."""
EXPERT_ROWS = 64
"""Block size in rows of grouped GEMMs; the last block of an expert is half empty on average."""
STAGE_MICRO_BATCHES = 2
"""Micro-batches per pipeline stage if there are as many rollouts; more where one is too large."""
COLUMN_BYTES = 40.0
"""Bytes that all columns of a group store per token."""
MAX_SECONDS, MAX_COUNT = 3600.0, 1e12
"""Largest valid times, and counts and bytes, far above the need of any device."""


@dataclass(frozen=True)
class CostConstants:
    """Speeds, overheads and bytes from which the cost model predicts durations and memory.

    The defaults of generation reproduce the A100 measurements of arXiv:2409.19256 (2024,
    Figure 15); later engines have a smaller host overhead per rollout.

    Matrix products. A device reaches a fraction of its FLOP/s, less if tensor parallelism or a
    small model makes matrices narrow. With width w = hidden / tensor-parallel size, the fraction is
    fraction * w / (w + half_width). Example: 0.6 and half_width 256 give 0.57 at w = 4096 and 0.48
    at w = 1024.
    train_flops_fraction: forward and backward, without communication and bubbles.
    forward_flops_fraction: prefill and scoring.
    decode_flops_fraction: a decode step.
    half_width: width at which half of the fraction is reached.
    recompute: whether the backward pass repeats the forward pass (activation checkpointing).

    Memory and links.
    decode_memory_fraction: achieved fraction of memory bandwidth when a decode step reads weights
      and KV cache.
    link_fraction, network_fraction: achieved fraction of bandwidth within a node, between nodes.
    collective_s: fixed latency of a collective, besides hops and bytes.
    link_hop_s, network_hop_s: added latency per hop between devices of a node, and between nodes.

    Generation.
    max_running: maximum concurrent rollouts of a replica.
    decode_step_s, decode_layer_s, decode_rollout_s: host time per decode step, per layer of a step,
      per rollout in a step.
    decode_group_s: host time per finished group.
    begin_s: latency from a prompt in the queue to its slot in the engine.

    Training.
    micro_batch_s, update_s, train_step_s: overhead per micro-batch, update and step.
    round_s: idle time of ranks before each round of micro-batches and each update, until the
      request for the next work arrives.
    expert_layer_s: host time per expert layer of a forward pass: sorting tokens and waiting for
      their counts.

    Scoring.
    score_batch_s, score_rollout_s: overhead per scoring batch and per rollout.
    score_tokens: maximum tokens of a scoring batch.
    rule_group_s, rule_rollout_s: time of a rule-based reward per group and per rollout.

    Versions.
    publish_s, pull_s: overhead of publishing a version, and of pulling the version for a follower
      that has devices of its own.
    switch_s: overhead per version of a follower that shares the trainer's devices.
    pause_fraction: fraction of a pull in which the follower computes nothing.

    The stream.
    hop_s: latency from one stage to the next.
    between_steps_s: coordinator time between steps.

    Offloading applies to calls that share devices with others; the bytes move to the device and
    back once a step.
    offloads_optimizer: offload the optimizer state.
    offloads_weights: offload the weights of trained models, and free their gradients; drop the
      weights of forward-only models, which need not move back.

    Bytes. Those of training give the memory of other systems; that of streamrl's trainers comes
    from `engines/memory`, the model by which a run checks its workers.
    weight_bytes, gradient_bytes, optimizer_bytes: per trained parameter; optimizer_bytes include
      master weights.
    reduced_bytes: per gradient element in a reduction.
    activation_bytes: per token, layer and element of the hidden width.
    logit_bytes: per token and vocabulary entry.
    served_bytes: per weight of a forward-only model.
    kv_bytes: per element of the KV cache.
    memory_reserve_fraction: fraction of a device's memory kept for libraries and fragmentation.
    """

    train_flops_fraction: float = 0.6
    forward_flops_fraction: float = 0.65
    decode_flops_fraction: float = 0.5
    half_width: float = 256.0
    recompute: bool = True

    decode_memory_fraction: float = 0.7
    link_fraction: float = 0.7
    network_fraction: float = 0.8
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
    expert_layer_s: float = 0.0

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

    offloads_optimizer: bool = False
    offloads_weights: bool = False

    weight_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    reduced_bytes: int = 4
    activation_bytes: float = 34.0
    logit_bytes: float = 8.0
    served_bytes: int = 2
    kv_bytes: int = 2
    memory_reserve_fraction: float = 0.15

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            low, high = get_bounds(name)
            if not low <= value <= high:
                raise ConfigError(f"{name}={value!s:.40}: must be from {low:g} to {high:g}")

    @classmethod
    def from_cluster(cls, cluster: Cluster) -> "CostConstants":
        return CPU_CONSTANTS if cluster.is_cpu else cls()

    @classmethod
    def from_yaml(cls, path: Path, defaults: "CostConstants | None" = None) -> "CostConstants":
        """Read constants from a YAML file; names that the file lacks keep their `defaults`.

        Raise ConfigError, which suggests the nearest valid name, for an invalid file.
        """
        with wrap_file_errors(f"constants {path}"):
            values = read_small_yaml(path)
        if not isinstance(values, Mapping):
            raise ConfigError(f"constants {path}: must be a mapping of names to numbers")
        known = asdict(defaults or cls())
        given = {name: value for name, value in values.items() if name not in REMOVED_CONSTANTS}
        return read_settings(cls, known | given, section=f"constants {path}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def get_bounds(name: str) -> tuple[float, float]:
    """Return the least and the largest value of a constant; the model divides by fractions."""
    if name.endswith("_fraction"):
        may_be_zero = name in ("pause_fraction", "memory_reserve_fraction")
        return (0.0 if may_be_zero else 1e-6), 1.0
    if name.endswith("_s"):
        return 0.0, MAX_SECONDS
    return float(name in ("max_running", "score_tokens")), MAX_COUNT


REMOVED_CONSTANTS = {
    *("optimizer_memory_fraction", "host_fraction", "zero_exposed_fraction"),
    *("expert_rows", "stage_micro_batches", "column_bytes"),
    *("updates_on_host", "scores_from_host", "versions_on_device", "raw_gradient_bytes"),
    *("head_gradient_bytes", "update_bytes", "gathered_params", "mlp_bytes", "checkpoint_bytes"),
    *("logit_tokens", "keeps_served", "aliases_served", "keeps_kv"),
}
"""Constants in files of earlier versions: fixed numbers now, or settings of the run."""

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
)
"""Default constants of CPU devices: higher latencies, and float32 throughout."""
