"""Settings of the rewards and of the stage that computes them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import ConfigError


@dataclass
class RewardConfig:
    """One reward of a run: an entry of the list `rewards`.

    kind: how it is computed; `streamrl rewards` lists the kinds.
    name: the component's name, logged as reward/<name>; empty: the kind.
    weight: factor in the weighted sum that is the score; 0 only logs the component.
    gate: where this component is not passed, the score is 0 whatever the others say.
    options: of the kind; they may stand beside these, as in {kind: regex, pattern: x}.
    """

    kind: str = ""
    name: str = ""
    weight: float = 1.0
    gate: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def component_name(self) -> str:
        """Name of the component."""
        return self.name or self.kind


@dataclass
class ScorerConfig:
    """The stage that computes the rewards.

    replicas: scorer processes.
    max_groups: groups a replica works on at once.
    timeout_s: deadline of scoring one group once, s.
    combine: what makes one score of the components, as file.py:function; empty: the weighted sum.
    """

    replicas: int = 1
    max_groups: int = 32
    timeout_s: float = 30.0
    combine: str = ""

    def __post_init__(self) -> None:
        for key in ("replicas", "max_groups"):
            if vars(self)[key] < 1:
                raise ConfigError(f"scorer.{key}={vars(self)[key]}: must be 1 or more")
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"scorer.timeout_s={self.timeout_s}: must be above 0 and finite")


@dataclass
class SandboxConfig:
    """Where programs that a policy wrote are run.

    allow_unsafe: run them on a machine that cannot isolate them. They can then do all that the user
        who runs streamrl can.
    """

    allow_unsafe: bool = False


def fold_options(entry: dict[str, Any], own: Iterator[str] | set[str]) -> dict[str, Any]:
    """An entry whose options stand beside its other keys, with them under `options`."""
    known = set(own)
    beside = {key: value for key, value in entry.items() if key not in known}
    if not beside:
        return entry
    options = entry.get("options", {})
    if not isinstance(options, dict):
        return entry
    rest = {key: value for key, value in entry.items() if key in known}
    return {**rest, "options": {**options, **beside}}
