"""Config section `telemetry`: outputs of a run, trackers, and recorded rollouts."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from streamrl.errors import ConfigError
from streamrl.files.typed_settings import at_least, one_of

WANDB_MODES = ("offline", "online", "disabled")
CONSOLE_MODES = ("auto", "live", "plain", "none")


@dataclass
class WandbConfig:
    """Settings for Weights & Biases, whose own variables, such as WANDB_ENTITY, apply.

    mode: offline (files only, no account needed), online (needs `wandb login`) or disabled.
    project: the project's name.
    """

    mode: Annotated[str, one_of(*WANDB_MODES)] = "offline"
    project: str = "streamrl"

    def __post_init__(self) -> None:
        if self.is_enabled and not self.project:
            raise ConfigError("telemetry.wandb.project=: must not be empty")

    @property
    def is_enabled(self) -> bool:
        return self.mode != "disabled"


@dataclass
class RolloutConfig:
    """Rollouts that a run records in `rollouts/`.

    every: record all groups that each n-th training step trains; 0 records none.
    logprobs: record text and logprob of each sampled token, for up to 16,384 tokens of a group.
        Decoding takes a scorer about 20 us per token.
    """

    max_gib: ClassVar[float] = 1.0
    """Size of the folder from which every second recorded step is deleted, GiB.

    Later steps are then recorded half as often.
    """
    every: Annotated[int, at_least(0)] = 1
    logprobs: bool = False


@dataclass
class TelemetryConfig:
    """Outputs of a run, besides metrics.jsonl, events.jsonl and trace.json.

    rollouts: which rollouts are recorded.
    wandb: settings for Weights & Biases.
    console: live (a view that redraws), plain (a line per step), none, or auto, which is live on a
        terminal and plain elsewhere.
    """

    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    console: Annotated[str, one_of(*CONSOLE_MODES)] = "auto"
