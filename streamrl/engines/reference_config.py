"""Whether and when the reference moves: the settings."""

from dataclasses import dataclass

from streamrl.errors import ConfigError

REFERENCE_FILE, LEGACY_REFERENCE_FILE = "reference.safetensors", "reference.pt"
"""Of a reference that moves, in the trainer's state; the second is what it once was."""


@dataclass
class ReferenceConfig:
    """The reference: how many, and whether it follows the policy."""

    #: Steps after which the reference moves; 0 leaves it where the run started.
    every: int = 0
    #: How much of the reference stays when it moves: 0 makes it a copy of the policy.
    decay: float = 0.0
    #: Processes that compute reference logprobs, each with the whole model.
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"reference.replicas={self.replicas}: must be at least 1")
        if self.every < 0:
            raise ConfigError(f"reference.every={self.every}: must be 0 or more")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"reference.decay={self.decay}: must be from 0 to below 1")
        if self.decay and not self.every:
            raise ConfigError(
                f"reference.decay={self.decay}: the reference does not move with reference.every=0"
            )

    def is_updated_at(self, version: int) -> bool:
        """Whether the reference moves when the policy reaches this version."""
        return bool(self.every) and version > 0 and version % self.every == 0

    def find_reference_version(self, version: int) -> int:
        """The policy's version at which the reference moved last, as of this one."""
        return version - version % self.every if self.every else version
