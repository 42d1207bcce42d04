"""What a run reports, and whether to Weights & Biases."""

from dataclasses import dataclass, field

from streamrl.errors import ConfigError

WANDB_MODES = ("offline", "online", "disabled")
CONSOLE_MODES = ("auto", "live", "plain", "none")


@dataclass
class WandbConfig:
    """Whether and where metrics go to Weights & Biases.

    mode: offline (files only, no account needed), online (needs `wandb login`) or disabled.
    project: the project's name.
    entity: the user or team that owns it; empty is the account's default.
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
class TelemetryConfig:
    """What a run reports beside metrics.jsonl and events.jsonl, which it always writes.

    wandb: Weights & Biases, see WandbConfig.
    console: live (a view that is redrawn), plain (a line per step), none, or auto, which is live on
        a terminal and plain elsewhere.
    trace: whether to write trace.json, the spans of every process (for Perfetto); of a long run
        the latest, some of them in trace.earlier.json beside it.
    """

    wandb: WandbConfig = field(default_factory=WandbConfig)
    console: str = "auto"
    trace: bool = True

    def __post_init__(self) -> None:
        if self.console not in CONSOLE_MODES:
            rule = f"must be one of {', '.join(CONSOLE_MODES)}"
            raise ConfigError(f"telemetry.console={self.console}: {rule}")
