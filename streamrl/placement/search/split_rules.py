"""How a call may be split: what a search may choose of."""

from collections.abc import Callable, Sequence

from streamrl.dataflow import Call, Kind
from streamrl.resharding import Grid

Rules = Callable[[Call, Grid], Sequence[int]]
"""The ZeRO stages under which a call may be split so, the plainest first; none where it may not."""

UNSHARDED = (1,)
"""For who has nothing to shard: a call that is not trained, or one replica."""
SHARDED = (1, 3)
"""Of replicas that are trained: the optimizer's state is sharded over them, or all of it."""


def anything(call: Call, grid: Grid) -> Sequence[int]:
    """Any grid, with pipeline stages or without."""
    return SHARDED if call.kind is Kind.TRAIN and grid.replicas > 1 else UNSHARDED
