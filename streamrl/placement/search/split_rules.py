"""Rules for the parallelism that a search may choose."""

from collections.abc import Callable, Sequence

from streamrl.dataflow import CallKind, ModelCall
from streamrl.resharding import RankGrid

SplitRules = Callable[[ModelCall, RankGrid], Sequence[int]]
"""ZeRO stages allowed for a call on a grid, plainest first; empty if the grid is not allowed."""

UNSHARDED_ZERO_STAGES = (1,)
"""For a call without replicas to shard over, or without training."""
SHARDED_ZERO_STAGES = (1, 3)
"""For replicated training: shard the optimizer state, or everything."""


def allow_any_split(call: ModelCall, grid: RankGrid) -> Sequence[int]:
    """Allow any grid."""
    return (
        SHARDED_ZERO_STAGES
        if call.kind is CallKind.TRAIN and grid.dp_size > 1
        else UNSHARDED_ZERO_STAGES
    )
