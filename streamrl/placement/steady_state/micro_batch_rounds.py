"""Rounds of micro-batches that a mini-batch of rollouts makes, of their lengths alone.

As `buffer/assembly/packing.py` packs them, which tests hold this to. What it needs beyond: how many
tokens the largest micro-batch of each round has, as all ranks wait for who has it.
"""

import heapq
import math

import numpy as np

from streamrl.messages import Array
from streamrl.placement.workload import Workload


def pack_mini_batch(workload: Workload, shares: int) -> tuple[int, float]:
    """`pack_rounds` a mini-batch whose completions are the quantiles of their distribution."""
    if shares not in workload.packing_cache:
        rollouts = math.ceil(workload.num_rollouts / workload.mini_batches)
        parts = (np.arange(rollouts) + 0.5) / rollouts
        lengths = workload.prompt_tokens + np.rint(workload.lengths.quantiles(parts))
        workload.packing_cache[shares] = pack_rounds(lengths, workload.micro_batch_tokens, shares)
    return workload.packing_cache[shares]


def pack_rounds(lengths: Array, budget: float, shares: int) -> tuple[int, float]:
    """Rounds of one micro-batch a share, and the most tokens of a share in each, added up.

    Micro-batches take the longest first, at most `budget` tokens with their padding; the largest
    are halved until each share has one in every round, or there is none left to halve.
    """
    ordered = np.sort(lengths)[::-1]
    bins, start = [], 0
    while start < len(ordered):
        rows = max(1, int(budget // ordered[start]))
        bins.append(ordered[start : start + rows])
        start += rows
    bins = sorted(_halve_largest(bins, shares), key=_padded_tokens, reverse=True)
    sums = [float(rows.sum()) for rows in bins]
    firsts = range(0, len(sums), shares)
    return len(firsts), sum(max(sums[first : first + shares]) for first in firsts)


def _halve_largest(bins: list[Array], shares: int) -> list[Array]:
    """With the largest halved until they fill whole rounds."""
    heap = [(-_padded_tokens(rows), i) for i, rows in enumerate(bins) if len(rows) > 1]
    heapq.heapify(heap)
    made, halved = list(bins), set[int]()
    while heap and (len(made) - len(halved)) % shares:
        _, i = heapq.heappop(heap)
        halved.add(i)
        for half in (made[i][::2], made[i][1::2]):
            if len(half) > 1:
                heapq.heappush(heap, (-_padded_tokens(half), len(made)))
            made.append(half)
    return [rows for i, rows in enumerate(made) if i not in halved]


def _padded_tokens(rows: Array) -> float:
    return len(rows) * float(rows[0])
