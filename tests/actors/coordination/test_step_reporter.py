"""Reports to the driver: spans belong to the right step; long work has a status."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from streamrl.actors.actor_context import ActorReport
from streamrl.actors.coordination.driver_events import (
    DriverEvents,
    EventReport,
    RolloutReport,
    StepReport,
)
from streamrl.actors.coordination.role_actors import RoleActors
from streamrl.actors.coordination.step_reporter import (
    DRAIN_EVERY_S,
    DRAIN_TIMEOUT_S,
    LAST_DRAIN_TIMEOUT_S,
    StepReporter,
)
from streamrl.buffer.run_log import LedgerCounts, TrainedGroup
from streamrl.buffer.shard import ShardStats
from streamrl.config.run_config import load_config
from streamrl.dataflow import build_dataflow
from streamrl.errors import DeadlineError
from streamrl.messages import ROLLOUT_COLUMNS, GroupInfo
from streamrl.stream.protocols import StepResult, TrainStepResult
from streamrl.telemetry.progress import WorkStatus
from streamrl.telemetry.rollout_log import RecordedGroup, RecordedRollout
from streamrl.telemetry.spans import SpanRecorder
from tests.actors.fakes import RECIPE, FakeActor
from tests.virtual_time import in_virtual_time

SUMS = dict.fromkeys(
    (
        *("rollouts", "groups", "equal_score_groups", "included", "score_sum"),
        *("score_squared_sum", "sampled_sum", "sampled_max", "probability_sum", "truncated_sum"),
    ),
    1.0,
)


class Worker:
    """Actor that records spans on the loop's clock, and replies `delay_s` after a call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spans = SpanRecorder(name, lambda: asyncio.get_running_loop().time())
        self.drains: list[float] = []
        self.recorded: list[RecordedGroup] = []
        self.advantages: dict[str, dict[int, float]] = {}
        self.delay_s = 0.0

    async def collect_report(self) -> ActorReport:
        await asyncio.sleep(self.delay_s)
        self.drains.append(asyncio.get_running_loop().time())
        recorded, self.recorded = self.recorded, []
        advantages, self.advantages = self.advantages, {}
        return ActorReport(self.name, self.spans.drain_spans(), recorded, advantages)

    async def work(self, seconds: float) -> None:
        with self.spans.record_span("work"):
            await asyncio.sleep(seconds)


def finish_step(version: int, ended_at: float, *, uid: str = "a") -> StepResult:
    group = TrainedGroup(uid, GroupInfo((6,), 4, ((version, 4),)), ready_version=version)
    return StepResult(
        version=version,
        groups=[group],
        results_by_role={"policy": TrainStepResult(SUMS, [{}])},
        adaptive_params={},
        queue_stats=ShardStats({}, 0, 0.0, (), {}),
        ledger_counts=LedgerCounts(1, 1, 0, 0, 0, ()),
        ended_at=ended_at,
    )


class Reported:
    """Reporter over two workers, with its posted reports."""

    def __init__(self) -> None:
        self.generator, self.rank = Worker("generator-0"), Worker("trainer-0")
        self.feed = DriverEvents()
        calls = build_dataflow(ROLLOUT_COLUMNS).calls_by_role
        roles = self.roles = [
            RoleActors(calls["generator"], ["generator-0"], [FakeActor(self.generator)]),
            RoleActors(calls["policy"], ["trainer-0"], [FakeActor(self.rank)]),
        ]
        self.reporter = StepReporter(load_config(RECIPE), roles, self.feed)
        self.reporter.start()

    async def finish(self) -> Sequence[StepReport]:
        return (await self.finish_all())[0]

    async def finish_all(self) -> tuple[list[StepReport], dict[int, Sequence[RecordedGroup]]]:
        """Return the steps' reports, and the recorded groups by step, posted once per step."""
        await self.reporter.finish_reporting()
        reports = await self.feed.read_after(0, 1.0)
        rollouts = [report for report in reports if isinstance(report, RolloutReport)]
        steps = [report for report in reports if isinstance(report, StepReport)]
        assert len(rollouts) + len(steps) == len(reports)
        recorded = {report.step: report.groups for report in rollouts}
        assert len(recorded) == len(rollouts)
        return steps, recorded


@in_virtual_time
async def test_a_span_across_a_step_boundary_counts_in_both_steps_and_is_traced_once():
    run = Reported()
    working = asyncio.create_task(run.generator.work(3.0))
    await asyncio.sleep(2.0)
    run.reporter.add_step(finish_step(0, ended_at=2.0), {})
    await asyncio.sleep(2.0)
    run.reporter.add_step(finish_step(1, ended_at=4.0), {})
    first, second = await run.finish()
    await working
    assert [first.row["idle/generate"], second.row["idle/generate"]] == pytest.approx([0, 0.5])
    assert (first.row["idle/train"], second.row["idle/train"]) == (1.0, 1.0)
    assert list(first.spans) == []
    assert [(span.start_s, span.end_s) for span in second.spans] == [(0.0, 3.0)]


@in_virtual_time
async def test_fast_steps_share_a_drain_but_keep_separate_windows():
    run = Reported()
    await asyncio.sleep(1.0)
    run.reporter.add_step(finish_step(0, ended_at=1.0), {})
    for version in range(1, 6):
        start = asyncio.get_running_loop().time()
        await run.rank.work(0.01)
        await asyncio.sleep(0.01)
        run.reporter.add_step(finish_step(version, ended_at=start + 0.02), {})
    reports = await run.finish()
    assert run.rank.drains == pytest.approx([1.0, 1.0 + DRAIN_EVERY_S])
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6]
    assert [report.row["idle/train"] for report in reports[2:]] == pytest.approx([0.5] * 4)
    assert sum(len(report.spans) for report in reports) == 5


@in_virtual_time
async def test_a_replica_counts_from_joining_until_leaving():
    run, joined_worker = Reported(), Worker("generator-1")
    generators = run.roles[0]
    joining = asyncio.create_task(joined_worker.work(2.0))
    generators.add_replica("generator-1", FakeActor(joined_worker))
    await asyncio.sleep(2.0)
    run.reporter.add_step(finish_step(0, ended_at=2.0), {})
    await asyncio.sleep(1.0)
    await joining
    generators.remove_replica("generator-1")
    generators.remove_replica("generator-1")
    await run.generator.work(1.0)
    run.reporter.add_step(finish_step(1, ended_at=4.0), {})
    first, second = await run.finish()
    assert [first.row["idle/generate"], second.row["idle/generate"]] == pytest.approx([0.5] * 2)
    assert (len(joined_worker.drains), len(run.generator.drains)) == (1, 2)


def make_group(uid: str, *, rows: Sequence[int] = (0,)) -> RecordedGroup:
    rollouts = tuple(RecordedRollout("a", 1.0, row=row) for row in rows)
    return RecordedGroup(0, uid, rollouts)


@in_virtual_time
async def test_a_recorded_group_is_reported_with_its_step_and_the_advantages_of_its_rows():
    run = Reported()
    run.generator.recorded = [make_group("a", rows=(0, 2)), make_group("b")]
    run.rank.advantages = {"a": {0: -0.5, 1: 0.25, 2: 0.75}}
    run.reporter.add_step(finish_step(0, ended_at=1.0, uid="a"), {})
    await asyncio.sleep(1.0)
    run.generator.recorded = [make_group("c")]
    run.reporter.add_step(finish_step(1, ended_at=2.0, uid="c"), {})
    await asyncio.sleep(1.0)
    run.reporter.add_step(finish_step(2, ended_at=3.0, uid="b"), {})
    await asyncio.sleep(1.0)
    run.reporter.add_step(finish_step(3, ended_at=4.0, uid="d"), {})
    _, recorded = await run.finish_all()
    uids = {step: [(g.uid, g.step) for g in groups] for step, groups in recorded.items()}
    assert uids == {1: [("a", 1)], 2: [("c", 2)], 3: [("b", 3)]}
    assert [rollout.advantage for rollout in recorded[1][0].rollouts] == [-0.5, 0.75]


@in_virtual_time
async def test_groups_that_are_never_trained_are_forgotten():
    run = Reported()
    limit = run.reporter._max_pending
    run.generator.recorded = [make_group("old"), *(make_group(f"0:{i}:0") for i in range(limit))]
    run.reporter.add_step(finish_step(0, ended_at=1.0, uid="none"), {})
    await asyncio.sleep(1.0)
    run.reporter.add_step(finish_step(1, ended_at=2.0, uid="old"), {})
    steps, recorded = await run.finish_all()
    assert len(steps) == 2 and not recorded


@in_virtual_time
async def test_a_wall_clock_set_back_gives_a_step_of_no_length():
    run = Reported()
    for version, ended_at in enumerate((9.0, 5.0, 12.0)):
        run.reporter.add_step(finish_step(version, ended_at=ended_at), {})
    lengths = [report.row["time/step_s"] for report in await run.finish()]
    assert lengths == pytest.approx([9.0, 0.0, 3.0], abs=0.01)


@in_virtual_time
async def test_a_hung_actor_delays_a_report_only_briefly():
    run = Reported()
    await run.rank.work(1.0)
    run.generator.delay_s = 1000.0
    run.reporter.add_step(finish_step(0, ended_at=2.0), {})
    began = asyncio.get_running_loop().time()
    await run.reporter._steps.join()
    assert asyncio.get_running_loop().time() - began <= DRAIN_TIMEOUT_S + DRAIN_EVERY_S
    (report,) = await run.finish()
    assert report.row["idle/train"] == pytest.approx(0.5)
    waited_s = asyncio.get_running_loop().time() - began
    assert waited_s <= 2 * DRAIN_TIMEOUT_S + DRAIN_EVERY_S + LAST_DRAIN_TIMEOUT_S


@pytest.mark.parametrize("slow_name", ["generator", "rank"])
@pytest.mark.parametrize("later_steps", [0, 3])
@in_virtual_time
async def test_rollouts_of_a_slow_actor_are_reported_once_it_answers(
    slow_name: str, later_steps: int
):
    run = Reported()
    vars(run)[slow_name].delay_s = 3 * DRAIN_TIMEOUT_S
    run.generator.recorded = [make_group(uid) for uid in "abcd"]
    run.rank.advantages = {uid: {0: 0.5} for uid in "abcd"}
    for version, uid in enumerate("abcd"[: 1 + later_steps]):
        run.reporter.add_step(finish_step(version, ended_at=version + 1.0, uid=uid), {})
        await asyncio.sleep(2 * DRAIN_TIMEOUT_S)
    steps, recorded = await run.finish_all()
    assert [report.step for report in steps] == [*range(1, 2 + later_steps)]
    assert {step: [g.uid for g in groups] for step, groups in recorded.items()} == {
        step: [uid] for step, uid in enumerate("abcd"[: 1 + later_steps], start=1)
    }
    rollouts = [group.rollouts[0] for groups in recorded.values() for group in groups]
    assert [rollout.advantage for rollout in rollouts] == [0.5] * len(steps)


@in_virtual_time
async def test_a_slow_replica_that_leaves_holds_no_rollouts_back():
    run, leaving = Reported(), Worker("generator-1")
    leaving.delay_s = 1000.0
    run.roles[0].add_replica("generator-1", FakeActor(leaving))
    run.generator.recorded = [make_group("a")]
    run.reporter.add_step(finish_step(0, ended_at=1.0, uid="a"), {})
    await asyncio.sleep(2 * DRAIN_TIMEOUT_S)
    run.roles[0].remove_replica("generator-1")
    run.reporter.add_step(finish_step(1, ended_at=2.0, uid="b"), {})
    await asyncio.sleep(2 * DRAIN_TIMEOUT_S)
    reports = await run.feed.read_after(0, 1.0)
    assert [report.step for report in reports if isinstance(report, RolloutReport)] == [1]
    await run.finish_all()


@in_virtual_time
async def test_a_failed_drain_ends_the_wait_for_reports():
    run = Reported()

    async def fail() -> ActorReport:
        raise RuntimeError("gone")

    run.rank.collect_report = fail  # type: ignore[method-assign]
    run.reporter.add_step(finish_step(0, ended_at=1.0), {})
    async with asyncio.timeout(100.0):
        # A failed run waits for the reports before its last checkpoint, when nothing else watches.
        with pytest.raises(RuntimeError, match="gone"):
            await run.reporter.wait_until_idle()
        with pytest.raises(RuntimeError, match="gone"):
            await run.finish()


@in_virtual_time
async def test_a_report_counts_as_delivered_when_the_reader_asks_for_later_ones():
    events, times = DriverEvents(), list[float]()
    clock = asyncio.get_running_loop().time
    events.post_report(EventReport("note", {}))

    async def wait() -> None:
        await events.wait_until_delivered(10.0)
        times.append(clock())

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(1.0)
    assert len(await events.read_after(0, 1.0)) == 1, "sent, but not yet acknowledged"
    await asyncio.sleep(1.0)
    events.post_report(EventReport("later", {}))
    assert not times
    await events.read_after(1, 1.0)
    await waiting
    with pytest.raises(DeadlineError, match="the driver left 1 reports unread"):
        await events.wait_until_delivered(5.0)
    assert [*times, clock()] == [2.0, 7.0]


@in_virtual_time
async def test_update_metrics_are_averaged_over_the_updates_of_a_model():
    run, step = Reported(), finish_step(0, ended_at=1.0)
    results = {
        "policy": TrainStepResult(SUMS, [{"policy/grad_norm": 1.0}, {"policy/grad_norm": 3.0}]),
        "critic": TrainStepResult({}, [{"critic/grad_norm": 3.0}]),
    }
    run.reporter.add_step(replace(step, results_by_role=results), {})
    (report,) = await run.finish()
    assert report.row["policy/grad_norm"] == 2.0
    assert report.row["critic/grad_norm"] == 3.0


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(1.9, []), (5.5, [(2.0, 3), (3.0, 5), (4.0, 7), (5.0, 9)])],
)
@in_virtual_time
async def test_long_work_is_reported_every_second_until_it_ends(
    seconds: float, expected: list[tuple[float, int]]
):
    events, status = DriverEvents(), WorkStatus("evaluating version 3", 10, "prompts")
    with events.report_status(status):
        for _ in range(10):
            await asyncio.sleep(seconds / 10)
            status.advance()
    *reports, last = await events.read_after(0, 0.0)
    assert [(r.elapsed_s, r.completed) for r in reports if isinstance(r, WorkStatus)] == expected
    assert last == WorkStatus("") and len(reports) == len(expected)
