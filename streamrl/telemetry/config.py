"""Config section `telemetry`: outputs of a run, and Weights & Biases."""

from dataclasses import dataclass, field

from streamrl.errors import ConfigError

WANDB_MODES = ("offline", "online", "disabled")
CONSOLE_MODES = ("auto", "live", "plain", "none")


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
class TelemetryConfig:
    """Outputs of a run besides metrics.jsonl and events.jsonl.

    wandb: settings for Weights & Biases.
    console: live (a view that redraws), plain (a line per step), none, or auto, which is live on a
        terminal and plain elsewhere.
    trace: whether to write trace.json, the spans of every process, for Perfetto. A long run keeps
        the latest spans, the older half in trace.earlier.json.
    """

    wandb: WandbConfig = field(default_factory=WandbConfig)
    console: str = "auto"
    trace: bool = True

    def __post_init__(self) -> None:
        if self.console not in CONSOLE_MODES:
            rule = f"must be one of {', '.join(CONSOLE_MODES)}"
            raise ConfigError(f"telemetry.console={self.console}: {rule}")
