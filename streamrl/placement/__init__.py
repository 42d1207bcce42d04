"""Which actors a run needs, which devices its calls have, and what a placement would cost. Pure."""

from streamrl.placement.clusters import DEVICES, Cluster, Device, NodeGroup
from streamrl.placement.colocated_memory import WorkerMemory
from streamrl.placement.config import PlacementConfig
from streamrl.placement.constructors import of_meshes, of_ratios, of_sets, owner
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import SHAPES, ModelShape, shape_of
from streamrl.placement.placements import Assignment, Mode, Placement
from streamrl.placement.pools import STRATEGIES, SlotMap, lay_out
from streamrl.placement.problem import Estimate, Problem
from streamrl.placement.resource_demand import (
    SLOTS,
    Capacity,
    Demand,
    Settled,
    Way,
    check_fits,
    settle,
    total_cpus,
)
from streamrl.placement.run_options import Manner
from streamrl.placement.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    Timings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.placement.workload import (
    EmpiricalLengths,
    FixedLength,
    Lengths,
    LognormalLengths,
    Workload,
)

__all__ = [
    "DEVICES",
    "SHAPES",
    "SLOTS",
    "STRATEGIES",
    "Assignment",
    "Capacity",
    "Cluster",
    "Demand",
    "Device",
    "EmpiricalLengths",
    "Estimate",
    "FixedLength",
    "GeneratorTiming",
    "Lengths",
    "LognormalLengths",
    "Manner",
    "Mesh",
    "Mode",
    "ModelShape",
    "NodeGroup",
    "Placement",
    "PlacementConfig",
    "Problem",
    "ScoreTiming",
    "Settled",
    "SlotMap",
    "Timings",
    "TrainTiming",
    "Way",
    "WeightsTiming",
    "WorkerMemory",
    "Workload",
    "check_fits",
    "lay_out",
    "of_meshes",
    "of_ratios",
    "of_sets",
    "owner",
    "settle",
    "shape_of",
    "total_cpus",
]
