"""Settings of the rewards and of the stage that computes them."""

import math
from dataclasses import dataclass

from streamrl.errors import ConfigError


@dataclass
class RewardConfig:
    """One reward of a run: an entry of the list `rewards`.

    kind: how it is computed; a key of KINDS in streamrl/rewards/registry.py.
    name: the component's name, logged as reward/<name>; empty: the kind.
    weight: factor in the weighted sum that is the score; 0 only logs the component.
    pattern: kind regex: what to find; exact, numeric: where the answer stands; empty: everywhere.
    path: kind function: the Python file.
    function: kind function: the function's name in it.
    """

    kind: str = ""
    name: str = ""
    weight: float = 1.0
    pattern: str = ""
    path: str = ""
    function: str = ""

    @property
    def component(self) -> str:
        """Name of the component."""
        return self.name or self.kind


@dataclass
class ScorerConfig:
    """The stage that computes the rewards.

    replicas: scorer processes.
    max_groups: groups a replica works on at once.
    timeout_s: deadline of scoring one group once, s.
    """

    replicas: int = 1
    max_groups: int = 32
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for key in ("replicas", "max_groups"):
            if vars(self)[key] < 1:
                raise ConfigError(f"scorer.{key}={vars(self)[key]}: must be 1 or more")
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"scorer.timeout_s={self.timeout_s}: must be above 0 and finite")
