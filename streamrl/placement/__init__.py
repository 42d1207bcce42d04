"""Data of the planner: hardware, models, workload, devices per call, predicted cost."""

from streamrl.placement.clusters import DEVICES, Cluster, DeviceSpec, NodeGroup
from streamrl.placement.colocated_memory import WorkerMemory
from streamrl.placement.config import PlacementConfig
from streamrl.placement.constructors import (
    find_model_role,
    placement_from_meshes,
    placement_from_ratios,
    placement_from_sets,
)
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import MODEL_SHAPES, ModelShape, load_model_shape
from streamrl.placement.placements import CallAssignment, Placement, PlacementMode
from streamrl.placement.pools import POOL_STRATEGIES, SlotMap, lay_out_slots
from streamrl.placement.problem import PlacementEstimate, PlacementProblem
from streamrl.placement.resource_demand import (
    SHARED_SLOTS,
    ClusterCapacity,
    PlacementDecision,
    PlacementOption,
    ResourceDemand,
    check_fits,
    choose_mode,
    sum_cpus,
)
from streamrl.placement.run_options import RunOptions
from streamrl.placement.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.placement.workload import (
    EmpiricalLengths,
    FixedLength,
    LengthDistribution,
    LognormalLengths,
    Workload,
)

__all__ = [
    "DEVICES",
    "MODEL_SHAPES",
    "POOL_STRATEGIES",
    "SHARED_SLOTS",
    "CallAssignment",
    "Cluster",
    "ClusterCapacity",
    "DeviceSpec",
    "EmpiricalLengths",
    "FixedLength",
    "GeneratorTiming",
    "LengthDistribution",
    "LognormalLengths",
    "Mesh",
    "ModelShape",
    "NodeGroup",
    "Placement",
    "PlacementConfig",
    "PlacementDecision",
    "PlacementEstimate",
    "PlacementMode",
    "PlacementOption",
    "PlacementProblem",
    "ResourceDemand",
    "RunOptions",
    "ScoreTiming",
    "SlotMap",
    "StageTimings",
    "TrainTiming",
    "WeightsTiming",
    "WorkerMemory",
    "Workload",
    "check_fits",
    "choose_mode",
    "find_model_role",
    "lay_out_slots",
    "load_model_shape",
    "placement_from_meshes",
    "placement_from_ratios",
    "placement_from_sets",
    "sum_cpus",
]
