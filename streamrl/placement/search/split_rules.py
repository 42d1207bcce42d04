"""Rules for the parallelism and ZeRO stage that a placement search may choose."""

from collections.abc import Callable, Sequence

from streamrl.dataflow import CallKind, ModelCall
from streamrl.resharding.grids import RankGrid

SplitRules = Callable[[ModelCall, RankGrid], Sequence[int]]
"""ZeRO stages allowed for a call on a grid, plainest first; empty if the grid is not allowed."""

UNSHARDED_ZERO_STAGES = (1,)
"""ZeRO stages for a call that is not trained, or has no data-parallel ranks to shard over."""
SHARDED_ZERO_STAGES = (1, 3)
"""ZeRO stages for data-parallel training: shard the optimizer state (1), or all state (3)."""


def allow_any_split(call: ModelCall, grid: RankGrid) -> Sequence[int]:
    return (
        SHARDED_ZERO_STAGES
        if call.kind is CallKind.TRAIN and grid.dp_size > 1
        else UNSHARDED_ZERO_STAGES
    )
