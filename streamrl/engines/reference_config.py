"""Config section `reference`: the reference model and the steps that update it."""

from dataclasses import dataclass

from streamrl.errors import ConfigError

REFERENCE_FILE = "reference.safetensors"
"""File of an EMA reference in a trainer checkpoint."""


@dataclass
class ReferenceConfig:
    """Config section `reference`; by default the reference stays a copy of the initial policy."""

    #: Update the reference every this many training steps; 0 never does.
    every: int = 0
    #: Weight of the old reference in an update; 0 copies the policy.
    decay: float = 0.0
    #: Processes that compute reference logprobs, each with a full copy of the model.
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
                f"reference.decay={self.decay}: has no effect while reference.every=0;"
                " set reference.every"
            )

    def is_updated_at(self, version: int) -> bool:
        """Return whether the step that ends with `version` updates the reference."""
        return bool(self.every) and version > 0 and version % self.every == 0

    def find_reference_version(self, version: int) -> int:
        """Return the policy version at which the reference in use at `version` was updated last.

        With every=4, versions 4 to 7 use the reference of version 4. Without updates (every=0),
        returns `version` itself.
        """
        return version - version % self.every if self.every else version
