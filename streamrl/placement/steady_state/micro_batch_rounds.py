"""Rounds of micro-batches of a mini-batch, computed from rollout lengths alone.

The packing equals that of `buffer/assembly/packing.py`; a test compares both. This version also
returns the tokens of the largest micro-batch of each round, because all ranks wait for it.
"""

import heapq
import math

import numpy as np

from streamrl.messages import Array
from streamrl.placement.workload import Workload


def pack_mini_batch(workload: Workload, dp_size: int) -> tuple[int, float]:
    """Return the number of rounds of a mini-batch, and the tokens of their largest micro-batches.

    The tokens are summed over rounds, as in `pack_rounds`. Completion lengths are quantiles of the
    workload's length distribution; the workload caches results.
    """
    if dp_size not in workload.packing_cache:
        rollouts = math.ceil(workload.num_rollouts / workload.mini_batches)
        ranks = (np.arange(rollouts) + 0.5) / rollouts
        lengths = workload.prompt_tokens + np.rint(workload.completion_lengths.quantiles(ranks))
        workload.packing_cache[dp_size] = pack_rounds(lengths, workload.micro_batch_tokens, dp_size)
    return workload.packing_cache[dp_size]


def pack_rounds(lengths: Array, budget: float, dp_size: int) -> tuple[int, float]:
    """Return the number of rounds, and the sum of each round's largest micro-batch in tokens.

    lengths: tokens of each rollout, prompt included.
    A round has one micro-batch per data-parallel rank. Micro-batches take the longest rollouts
    first, at most `budget` tokens including padding; the largest are halved until every rank has
    one in every round, or none can be halved.

    Example: lengths [10, 6, 6, 3, 2, 1] with a budget of 12 and 2 ranks give the micro-batches
    [10], [6, 6] and [3, 2, 1]. Halving [6, 6] fills two rounds, ([10], [3, 2, 1]) and ([6], [6]);
    the result is (2, 10 + 6).
    """
    descending = np.sort(lengths)[::-1]
    bins, start = [], 0
    while start < len(descending):
        rows = max(1, int(budget // descending[start]))
        bins.append(descending[start : start + rows])
        start += rows
    bins = sorted(_halve_largest(bins, dp_size), key=_padded_tokens, reverse=True)
    sums = [float(rows.sum()) for rows in bins]
    firsts = range(0, len(sums), dp_size)
    return len(firsts), sum(max(sums[first : first + dp_size]) for first in firsts)


def _halve_largest(bins: list[Array], dp_size: int) -> list[Array]:
    """Halve the micro-batches with the most padded tokens until each rank has equally many."""
    heap = [(-_padded_tokens(rows), i) for i, rows in enumerate(bins) if len(rows) > 1]
    heapq.heapify(heap)
    micro_batches, halved = list(bins), set[int]()
    while heap and (len(micro_batches) - len(halved)) % dp_size:
        _, i = heapq.heappop(heap)
        halved.add(i)
        # Alternate rows, so that both halves have about equal tokens.
        for half in (micro_batches[i][::2], micro_batches[i][1::2]):
            if len(half) > 1:
                heapq.heappush(heap, (-_padded_tokens(half), len(micro_batches)))
            micro_batches.append(half)
    return [rows for i, rows in enumerate(micro_batches) if i not in halved]


def _padded_tokens(rows: Array) -> float:
    return len(rows) * float(rows[0])
