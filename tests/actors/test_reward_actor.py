"""The scorer's calls of the ranks that hold a reward model together."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.actors.rank_calls import RankCalls
from streamrl.actors.scoring_ranks import ModelScorerActor, RewardActor
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import StreamError
from streamrl.rewards.kinds.model import ModelOptions
from tests.actors.fakes import FakeActor
from tests.virtual_time import in_virtual_time


class Rank:
    """Rank whose logits are the sums of rows, or which fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls, self.released = error, list[Any](), asyncio.Event()

    async def compute_logits(self, rows: Sequence[Sequence[int]]) -> list[float]:
        self.calls.append(rows)
        await self.released.wait()
        if self.error:
            raise self.error
        return [float(sum(row)) for row in rows]


def make_leader(*ranks: Rank, **layout: Any) -> Any:
    """Return a scorer that leads these ranks."""
    actor: Any = RewardActor()
    config = ModelOptions(path="m", world_size=len(ranks), **layout).to_ranks_config("rewards[0]")
    names = [f"reward-0/{rank}" for rank in range(len(ranks))]
    actor._name = "reward-0"
    actors = [*map(FakeActor, ranks)]
    actor._ranks = RankCalls(names, actors, config, model_bytes=0, is_collective=True)
    return actor


ROWS = [[1], [2, 2], [3], [5, 5], [8]]


@pytest.mark.parametrize(
    ("layout", "shares"),
    [
        ({}, [ROWS[0::2], ROWS[1::2]]),  # FSDP2: different rows
        ({"tensor_parallel": 2}, [ROWS, ROWS]),
    ],
)
async def test_logits_come_back_in_the_order_of_the_rows(
    layout: dict[str, int], shares: list[Sequence[Any]]
):
    ranks = Rank(), Rank()
    for rank in ranks:
        rank.released.set()
    assert await make_leader(*ranks, **layout)._compute_on_ranks(ROWS) == [1, 4, 3, 10, 8]
    assert [rank.calls for rank in ranks] == [[share] for share in shares]


async def test_a_deadline_ends_no_pass_and_the_next_waits_for_it():
    ranks = Rank(), Rank()
    leader = make_leader(*ranks)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await leader._compute_on_ranks(ROWS)
    second = asyncio.create_task(leader._compute_on_ranks(ROWS[:1]))
    await asyncio.sleep(0.01)
    assert [len(rank.calls) for rank in ranks] == [1, 1]
    for rank in ranks:
        rank.released.set()
    assert await second == [1]


async def test_a_restarted_scorer_reports_nothing_before_its_ranks_have_started():
    report = await ModelScorerActor().collect_report()
    assert (report.process, report.spans) == ("", ())


@in_virtual_time
async def test_the_deadline_of_loading_a_version_grows_with_the_bytes_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
):
    async def run_here(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    class SlowRank:
        async def copy_weights(self) -> None:
            await asyncio.sleep(2800.0)

    monkeypatch.setattr(asyncio, "to_thread", run_here)  # virtual time waits for no thread
    leader: Any = ModelScorerActor()
    leader._model = SimpleNamespace(build_full=dict)
    # 140 GB at 100 MB/s, where the files are in bfloat16 and the model in float32.
    leader._ranks = RankCalls(
        ["value-0", "value-0/1"],
        [FakeActor(SlowRank()), FakeActor(SlowRank())],
        TrainerConfig(world_size=2),
        model_bytes=140 * 10**9,
        is_collective=True,
    )
    assert (await leader.load_weights({}, 1)).pause_s >= 0


async def test_an_error_of_one_rank_ends_the_process_of_all(monkeypatch: pytest.MonkeyPatch):
    ranks = Rank(), Rank(StreamError("out of memory"))
    ranks[1].released.set()  # Rank 0 still waits, as in a collective.
    leader = make_leader(*ranks)

    async def crash(reason: str) -> None:
        raise SystemError(reason)

    monkeypatch.setattr(leader, "crash_process", crash)
    with pytest.raises(SystemError, match="its ranks are lost: out of memory"):
        await leader._compute_on_ranks(ROWS)
    alone = make_leader(ranks[1])
    with pytest.raises(StreamError, match="out of memory"):
        await alone._compute_on_ranks(ROWS)
