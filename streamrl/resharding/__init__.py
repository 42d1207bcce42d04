"""Resharding: layouts of a model over ranks, and plans that move tensors between layouts."""

from streamrl.resharding.boxes import TensorBox
from streamrl.resharding.byte_report import BytesReport, NodeTopology, RankBytes, compute_table_2
from streamrl.resharding.grids import RANK_ORDERS, RankAssignment, RankCoordinates, RankGrid
from streamrl.resharding.grouping import (
    GROUPINGS,
    GenerationSizes,
    assign_generation_ranks,
    assign_max_overlap,
    assign_vanilla,
    assign_zero_redundancy,
    list_micro_dp_groups,
)
from streamrl.resharding.layouts import (
    ModelLayout,
    TensorShard,
    create_layout,
    create_tensor_shard,
    create_whole_shard,
    partition_fsdp2,
    partition_zero3,
)
from streamrl.resharding.plans import BoxCopy, CopyPlan, GatherPlan, plan_copies, plan_gather
from streamrl.resharding.tensor_specs import FusedComponent, ModelSpec, TensorSpec, merge_stages

__all__ = [
    "GROUPINGS",
    "RANK_ORDERS",
    "BoxCopy",
    "BytesReport",
    "CopyPlan",
    "FusedComponent",
    "GatherPlan",
    "GenerationSizes",
    "ModelLayout",
    "ModelSpec",
    "NodeTopology",
    "RankAssignment",
    "RankBytes",
    "RankCoordinates",
    "RankGrid",
    "TensorBox",
    "TensorShard",
    "TensorSpec",
    "assign_generation_ranks",
    "assign_max_overlap",
    "assign_vanilla",
    "assign_zero_redundancy",
    "compute_table_2",
    "create_layout",
    "create_tensor_shard",
    "create_whole_shard",
    "list_micro_dp_groups",
    "merge_stages",
    "partition_fsdp2",
    "partition_zero3",
    "plan_copies",
    "plan_gather",
]
