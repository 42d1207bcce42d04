"""Input and output of the planner: the placement problem, the cost protocol, the estimate."""

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
    """Run to place: calls, models, workload of a step, cluster and options.

    models: by role; a rule-based reward has no model and takes no devices.
    score_tokens: by role, maximum tokens of a scoring batch where the run sets it.
    kv_cache_bytes: KV cache per generating device; 0 takes the memory left over.
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
        """Return the model a call computes with; None for a call without a model."""
        call = next(call for call in self.dataflow.calls if call.stage == stage)
        return self.models.get(call.role) or self.models.get(call.followed_role)

    @property
    def placed_stages(self) -> list[str]:
        """Stages that need devices, in flow order."""
        return [call.stage for call in self.dataflow.ordered_calls if self.find_model(call.stage)]


@dataclass(frozen=True)
class CallMemory:
    """Bytes per device that a call holds: permanently, and additionally while it computes."""

    resident_bytes: float
    active_bytes: float

    @property
    def peak_bytes(self) -> float:
        return self.resident_bytes + self.active_bytes


@dataclass(frozen=True)
class DeviceInterval:
    """Time in which a call of a step had its devices, s."""

    stage: str
    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PlacementEstimate:
    """Steady state of a placement.

    step_s: time between two updates.
    tokens_per_s: sampled tokens that are trained, over the whole cluster.
    idle: by stage, the fraction of a step in which the stage does not compute.
    device_idle: idle fraction of all devices of the cluster, used or not.
    memory_bytes, free_bytes: use and rest of the fullest device.
    staleness_mean: of a trained token, in versions.
    infeasible_reason: empty for a feasible placement; otherwise step_s is infinite and all other
      figures are NaN.
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
        return cls(math.inf, infeasible_reason=why)


class PlacementCosts(Protocol):
    """Predicted costs of the calls of a problem; implementations cache results.

    `predict_memory` and `explain_infeasible` also accept a placement of some of the calls.
    """

    @property
    def approximate_costs(self) -> "PlacementCosts":
        """Costs for a search: fast for thousands of placements, with an error of a few percent."""
        ...

    def predict_timings(self, placement: Placement) -> StageTimings: ...

    def predict_memory(self, placement: Placement) -> Mapping[str, CallMemory]:
        """Return bytes per device that each call holds, by stage."""
        ...

    def explain_infeasible(self, placement: Placement) -> str:
        """Return why the placement is infeasible, such as lack of memory; empty if feasible."""
        ...

    def call_duration_s(self, stage: str, assignment: CallAssignment) -> float:
        """Return seconds of a call's whole step, alone on its devices; inf if memory is short."""
        ...

    def first_rollouts_s(self, assignment: CallAssignment) -> float:
        """Return seconds until the first rollouts of a step are complete and can be passed on.

        Generation is alone on its devices. Return inf if memory is short.
        """
        ...
