"""How a call may be split: what a search may choose of."""

from collections.abc import Callable, Sequence

from streamrl.dataflow import CallKind, ModelCall
from streamrl.resharding import RankGrid

SplitRules = Callable[[ModelCall, RankGrid], Sequence[int]]
"""The ZeRO stages under which a call may be split so, the plainest first; none where it may not."""

UNSHARDED_ZERO_STAGES = (1,)
"""For who has nothing to shard: a call that is not trained, or one replica."""
SHARDED_ZERO_STAGES = (1, 3)
"""Of replicas that are trained: the optimizer's state is sharded over them, or all of it."""


def allow_any_split(call: ModelCall, grid: RankGrid) -> Sequence[int]:
    """Any grid, with pipeline stages or without."""
    return (
        SHARDED_ZERO_STAGES
        if call.kind is CallKind.TRAIN and grid.dp_size > 1
        else UNSHARDED_ZERO_STAGES
    )
