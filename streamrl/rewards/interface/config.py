"""Config sections `rewards`, `scorer` and `sandbox`."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from streamrl.files.typed_settings import INLINE, above, at_least, one_of
from streamrl.rewards.interface.completion import COMPLETION_PARTS, LAST_TURN


@dataclass
class RewardConfig:
    """Entry of the config list `rewards` or `costs`.

    kind: reward kind; `streamrl config --rewards` lists the kinds.
    name: component name, logged as reward/<name>; empty: the kind.
    weight: factor in the weighted sum; 0 only logs the component.
    gate: a completion that fails this component has combined score 0.
    of: part of an episode that the reward reads: last_turn, sampled (all turns of the policy) or
        conversation (with the environment's words; the kinds judge and model read chat messages).
        Equal for completions of a single turn.
    options: options of the kind; may also be given directly, as in {kind: regex, pattern: x}.
    """

    kind: str = ""
    name: str = ""
    weight: float = 1.0
    gate: bool = False
    of: Annotated[str, one_of(*COMPLETION_PARTS)] = LAST_TURN
    options: Annotated[dict[str, Any], INLINE] = field(default_factory=dict)

    @property
    def component_name(self) -> str:
        return self.name or self.kind


@dataclass
class ScorerConfig:
    """Config section `scorer`: the processes of the reward stage.

    replicas: scorer processes.
    max_groups: groups that a replica scores concurrently.
    timeout_s: deadline of one attempt to score a group, s.
    offload: keep the layers of reference, value and reward models in host memory, one pinned copy
        per node in /dev/shm, and copy each to the GPU while the layer before computes: two layers
        at most are there. For models larger than a GPU; no effect on a CPU.
    """

    replicas: Annotated[int, at_least(1)] = 1
    max_groups: Annotated[int, at_least(1)] = 32
    timeout_s: Annotated[float, above(0)] = 30.0
    offload: bool = False


@dataclass
class SandboxConfig:
    """Config section `sandbox`: isolation of generated programs.

    allow_unsafe: run programs even if this machine cannot isolate them. The programs then have all
        rights of the user of streamrl.
    """

    allow_unsafe: bool = False
