"""What is asked of the planner, and what it says of one placement."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streamrl.dataflow import CallKind, Dataflow
from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.placement.model_shapes import ModelShape
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.run_options import RunOptions
from streamrl.placement.stage_timings import StageTimings
from streamrl.placement.workload import Workload


@dataclass(frozen=True)
class PlacementProblem:
    """A run to be placed: its calls, its models, a step's work, where it is to run, and how.

    models: by role, of those that have one; a reward that is a rule has none, and takes no devices.
    score_tokens: by role, most tokens of a batch that it scores, where the run says so.
    kv_cache_bytes: for keys and values, of each device that samples; 0 gives them what is left.
    """

    dataflow: Dataflow
    models: Mapping[str, ModelShape]
    workload: Workload
    cluster: Cluster
    run_options: RunOptions = field(default_factory=RunOptions)
    score_tokens: Mapping[str, int] = field(default_factory=dict)
    kv_cache_bytes: int = 0

    def __post_init__(self) -> None:
        for call in self.dataflow.calls:
            needed = call.role if call.kind is CallKind.TRAIN else call.followed_role
            if needed and needed not in self.models:
                raise ConfigError(f"model of {needed}: missing; {call.stage} computes with it")

    def find_model(self, stage: str) -> ModelShape | None:
        """The model a call computes with; None for one without."""
        call = next(call for call in self.dataflow.calls if call.stage == stage)
        return self.models.get(call.role) or self.models.get(call.followed_role)

    @property
    def placed_stages(self) -> list[str]:
        """The calls that need devices, in flow order."""
        return [call.stage for call in self.dataflow.ordered_calls if self.find_model(call.stage)]


@dataclass(frozen=True)
class CallMemory:
    """Bytes of one device that a call holds: always, and on top while it computes."""

    resident_bytes: float
    active_bytes: float

    @property
    def peak_bytes(self) -> float:
        """While it computes."""
        return self.resident_bytes + self.active_bytes


@dataclass(frozen=True)
class DeviceInterval:
    """When a call of a step had its devices, s; for a picture of devices and time."""

    stage: str
    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PlacementEstimate:
    """What a placement would do, in its steady state.

    step_s: from one update to the next. tokens_per_s: sampled tokens that are trained, of the whole
    cluster. idle: by stage, the part of a step it does not compute. device_idle: of all devices of
    the cluster, used or not. memory_bytes: of the fullest device; free_bytes: what that has left.
    staleness_mean: of a trained token, in versions. unfit: why it cannot be, empty if it can; the
    other figures are then infinite or NaN.
    """

    step_s: float
    tokens_per_s: float = math.nan
    idle: Mapping[str, float] = field(default_factory=dict)
    device_idle: float = math.nan
    memory_bytes: float = math.nan
    free_bytes: float = math.nan
    staleness_mean: float = math.nan
    timeline: Sequence[DeviceInterval] = ()
    infeasible_reason: str = ""

    @classmethod
    def make_infeasible(cls, why: str) -> "PlacementEstimate":
        """Of what cannot be."""
        return cls(math.inf, infeasible_reason=why)


class PlacementCosts(Protocol):
    """What calls cost in a problem's placements; what is asked twice is to be remembered.

    `memory` and `unfit` also answer for a placement of some of the calls.
    """

    @property
    def approximate_costs(self) -> "PlacementCosts":
        """The same for a search: fast for thousands of placements, and off by a few percent."""
        ...

    def predict_timings(self, placement: Placement) -> StageTimings:
        """How long things take."""
        ...

    def predict_memory(self, placement: Placement) -> Mapping[str, CallMemory]:
        """Bytes that each call holds of one of its devices, by stage."""
        ...

    def explain_infeasible(self, placement: Placement) -> str:
        """Why it cannot be, as where memory is short; empty if it can."""
        ...

    def call_duration_s(self, stage: str, assignment: CallAssignment) -> float:
        """A whole step's work of one call, alone on its devices, s; infinite where that is too
        little memory.
        """
        ...

    def first_rollouts_s(self, assignment: CallAssignment) -> float:
        """Of a step's generation, alone on its devices, until the first rollouts that others can
        go on with are complete, s; likewise infinite.
        """
        ...
