"""Layouts of a model over ranks, and what has to move from one to another."""

from streamrl.resharding.boxes import Box
from streamrl.resharding.byte_report import BytesReport, Nodes, RankBytes, table_2
from streamrl.resharding.grids import ORDERS, Coordinates, Grid, Seating
from streamrl.resharding.grouping import (
    GROUPINGS,
    GenerationSizes,
    max_overlap,
    micro_groups,
    seat,
    vanilla,
    zero_redundancy,
)
from streamrl.resharding.layouts import (
    Layout,
    Shard,
    chunked,
    seated_layout,
    tensor_shard,
    whole_shard,
    zero_partitioned,
)
from streamrl.resharding.plans import Copy, CopyPlan, GatherPlan, plan_copies, plan_gather
from streamrl.resharding.tensor_specs import Component, ModelSpec, TensorSpec, merged_stages

__all__ = [
    "GROUPINGS",
    "ORDERS",
    "Box",
    "BytesReport",
    "Component",
    "Coordinates",
    "Copy",
    "CopyPlan",
    "GatherPlan",
    "GenerationSizes",
    "Grid",
    "Layout",
    "ModelSpec",
    "Nodes",
    "RankBytes",
    "Seating",
    "Shard",
    "TensorSpec",
    "chunked",
    "max_overlap",
    "merged_stages",
    "micro_groups",
    "plan_copies",
    "plan_gather",
    "seat",
    "seated_layout",
    "table_2",
    "tensor_shard",
    "vanilla",
    "whole_shard",
    "zero_partitioned",
    "zero_redundancy",
]
