"""Config section `telemetry`: outputs of a run, trackers, and recorded rollouts."""

import math
from dataclasses import dataclass, field

from streamrl.errors import ConfigError
from streamrl.files.typed_settings import suggest_nearest

WANDB_MODES = ("offline", "online", "disabled")
CONSOLE_MODES = ("auto", "live", "plain", "none")
JSONL, WANDB, TENSORBOARD = "jsonl", "wandb", "tensorboard"
SINKS = (JSONL, WANDB, TENSORBOARD)


@dataclass
class WandbConfig:
    """Settings for Weights & Biases.

    mode: offline (files only, no account needed), online (needs `wandb login`) or disabled.
    project: the project's name.
    entity: user or team that owns the project; empty is the account's default.
    """

    mode: str = "offline"
    project: str = "streamrl"
    entity: str = ""

    def __post_init__(self) -> None:
        if self.mode not in WANDB_MODES:
            raise ConfigError(
                f"telemetry.wandb.mode={self.mode}: must be one of {', '.join(WANDB_MODES)}"
            )
        if self.mode != "disabled" and not self.project:
            raise ConfigError("telemetry.wandb.project=: must not be empty")


@dataclass
class RolloutConfig:
    """Rollouts that a run records in `rollouts/`.

    every: record all groups that each n-th training step trains; 0 records none.
    max_gib: size of the folder from which every second recorded step is deleted, GiB; later steps
        are then recorded half as often.
    logprobs: record text and logprob of each sampled token, for up to 16,384 tokens of a group.
        Decoding takes a scorer about 20 us per token.
    """

    every: int = 1
    max_gib: float = 1.0
    logprobs: bool = False

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"telemetry.rollouts.every={self.every}: must be at least 0")
        if not 0 < self.max_gib < math.inf:
            raise ConfigError(
                f"telemetry.rollouts.max_gib={self.max_gib}: must be above 0 and finite"
            )


@dataclass
class TelemetryConfig:
    """Outputs of a run.

    sinks: where metrics and events go: jsonl (metrics.jsonl and events.jsonl, which resuming and
        all commands read), wandb, tensorboard.
    rollouts: which rollouts are recorded.
    wandb: settings for Weights & Biases.
    console: live (a view that redraws), plain (a line per step), none, or auto, which is live on a
        terminal and plain elsewhere.
    trace: whether to write trace.json, the spans of every process, for Perfetto. A long run keeps
        the latest spans, the older half in trace.earlier.json.
    """

    sinks: list[str] = field(default_factory=lambda: [JSONL, WANDB])
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    console: str = "auto"
    trace: bool = True

    def __post_init__(self) -> None:
        for sink in self.sinks:
            if sink not in SINKS:
                hint = suggest_nearest(sink, SINKS, noun="sink")
                raise ConfigError(f"telemetry.sinks={sink}: no such sink; {hint}")
        if JSONL not in self.sinks:
            raise ConfigError(
                f"telemetry.sinks={','.join(self.sinks)}: must contain {JSONL}, which resuming and"
                " `streamrl report` read"
            )
        if self.console not in CONSOLE_MODES:
            rule = f"must be one of {', '.join(CONSOLE_MODES)}"
            raise ConfigError(f"telemetry.console={self.console}: {rule}")

    @property
    def uses_wandb(self) -> bool:
        return WANDB in self.sinks and self.wandb.mode != "disabled"
