"""Calls of a model's ranks: how they share leased groups, and what their leader records."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.actors import rank_calls
from streamrl.actors.rank_calls import share_leases
from streamrl.messages import Experience, GroupInfo, GroupLease
from streamrl.rewards.interface.config import ScorerConfig
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import StageContext
from streamrl.telemetry.spans import SpanRecorder


@given(st.lists(st.integers(1, 4096), max_size=40), st.integers(1, 8))
def test_ranks_share_all_leases_whole_and_about_equally(sizes: list[int], dp_size: int):
    experiences = [
        Experience(
            GroupLease(token, f"0:{token}:0", "value", 1, 10.0),
            0,
            info=GroupInfo((size,), size, ((0, size),)),
        )
        for token, size in enumerate(sizes)
    ]
    shares = share_leases(experiences, dp_size)
    leases = [lease for share in shares for lease in share]
    assert len(shares) == dp_size
    assert sorted(lease.token for lease in leases) == list(range(len(sizes)))
    loads = [sum(sizes[lease.token] for lease in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


async def test_spans_of_the_leader_do_not_accumulate(monkeypatch: pytest.MonkeyPatch):
    loops: list[Any] = []
    monkeypatch.setattr(rank_calls, "score_groups", lambda *args, **_: loops.append(args))
    stage = StageContext("value", None, DedicatedDeviceLease(), SpanRecorder("critic"))  # type: ignore[arg-type]
    config = SimpleNamespace(scorer=ScorerConfig())

    async def score(stage: str, experiences: object) -> None: ...

    rank_calls.lead_scoring(stage, score, config, 1)  # type: ignore[arg-type,unused-coroutine]
    ((leading, compute, _),) = loops
    for _ in range(5):
        async with leading.hold_devices():
            await compute([])
    assert len(leading.spans.drain_spans()) == 1
