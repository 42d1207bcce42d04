"""Worker groups on a pool: calls like methods of an object; data bypasses the controller."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.errors import ActorError, ActorLostError, ConfigError, DeadlineError, StreamError
from streamrl.own_loops import (
    PROTOCOLS,
    BatchRef,
    TransferProtocol,
    WorkerContext,
    transfers,
)
from streamrl.own_loops.worker_group import (
    ResourcePool,
    WorkerFailure,
    WorkerGroup,
    WorkerHost,
    fetch_rows,
    put,
)
from streamrl.resharding.grids import RankGrid
from tests.own_loops.test_transfer_protocols import make_mesh

pytestmark = pytest.mark.xdist_group("ray")


class Doubler:
    """Worker that doubles its input and reports its rank."""

    def __init__(self, context: WorkerContext, factor: float = 2.0) -> None:
        self._context = context
        self._factor = factor

    @transfers("P3D")
    def double(self, batch, more=0):
        rows = len(batch["x"])
        return {"x": batch["x"] * self._factor + more, "rank": np.full(rows, self._context.rank)}

    @transfers("P3D")
    def twice_as_many(self, batch):
        return {"x": np.repeat(batch["x"], 2)}

    @transfers("DP")
    def uneven(self, batch):
        """Return the right total of rows, but not per rank."""
        doubled = np.concatenate([batch["x"]] * 2)
        return {"x": doubled[: 0 if self._context.rank else None]}

    @transfers("ONE_TO_ALL")
    def where(self):
        return self._context.rank, self._context.address, self._context.port, os.getpid()

    @transfers("RANK_ZERO")
    def first(self):
        return self._context.rank

    @transfers("DP")
    def fail(self, batch):
        raise ValueError(f"not by rank {self._context.rank}")

    @transfers("ONE_TO_ALL")
    def sleep(self, seconds):
        time.sleep(seconds)


@pytest.fixture(scope="module")
def pool(local_ray: None) -> Iterator[ResourcePool]:
    pool = ResourcePool(4, groups=3)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def group(pool: ResourcePool) -> Iterator[WorkerGroup]:
    group = WorkerGroup(pool, Doubler, mesh=make_mesh("2-1-2"), timeout_s=60.0)
    yield group
    group.close()


def test_a_batch_is_split_over_ranks_and_collected_in_order(group: WorkerGroup):
    batch = put({"x": np.arange(5.0)})
    columns = group.double(batch, 100).load()
    assert columns["x"].tolist() == [100, 102, 104, 106, 108]
    # Two replicas of two pipeline stages: the last stages answer, with three and two rows.
    assert columns["rank"].tolist() == [1, 1, 1, 3, 3]
    empty = group.double(put({"x": np.arange(0.0)})).load()
    assert {name: len(column) for name, column in empty.items()} == {"x": 0, "rank": 0}


def test_a_reply_is_passed_to_the_next_call_by_reference(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
):
    fetched = []

    def record_fetch(batch: BatchRef) -> object:
        fetched.append(batch)
        return fetch_rows(batch)

    monkeypatch.setattr("streamrl.own_loops.worker_group.fetch_rows", record_fetch)
    first = group.double(put({"x": np.arange(6.0)}))
    second = group.double(first)
    repeated = group.twice_as_many(second)
    assert not fetched
    assert repeated.load()["x"].tolist() == [4.0 * (i // 2) for i in range(12)]


def test_columns_of_batches_and_replies_are_joined_dropped_and_renamed(group: WorkerGroup):
    prompts, more = put({"x": np.arange(4.0), "y": np.arange(4.0)}), put({"w": np.arange(4.0)})
    doubled = group.double(prompts).drop("rank").rename({"x": "z"})
    found = (more | (prompts.drop("x") | doubled)).load()
    expected = {"w": [0, 1, 2, 3], "y": [0, 1, 2, 3], "z": [0, 2, 4, 6]}
    assert {name: column.tolist() for name, column in found.items()} == expected


def test_ranks_know_their_context_and_rendezvous(group: WorkerGroup):
    contexts = group.where().get()
    assert [rank for rank, *_ in contexts] == [0, 1, 2, 3]
    assert len({(address, port) for _, address, port, _ in contexts}) == 1
    assert len({pid for *_, pid in contexts}) == 4
    assert group.first().get() == 0


def test_a_rank_must_return_as_many_rows_as_it_receives(group: WorkerGroup):
    with pytest.raises(ValueError, match=r"Doubler\.uneven: \[0.0, 2.0\] rows returned"):
        group.uneven(put({"x": np.arange(8.0)})).get()


def test_put_accepts_only_columns():
    for wrong in ({"x": 3}, {"x": "abc"}, None):
        with pytest.raises(ValueError, match="put: a batch must be a dict of columns"):
            put(wrong)  # type: ignore[arg-type]


class Hidden(Doubler):
    @transfers("ONE_TO_ALL")
    def close(self):
        return "by the worker"


def test_invalid_transfer_methods_are_refused(pool: ResourcePool):
    with pytest.raises(ConfigError, match=r"Hidden\.close: WorkerGroup itself has a method"):
        WorkerGroup(pool, Hidden, mesh=make_mesh("1-1-1"))
    with pytest.raises(ConfigError, match="protocol dp: must be one of ONE_TO_ALL, "):
        transfers("dp")

    async def wait_long(self: Doubler) -> None: ...

    with pytest.raises(ConfigError, match="wait_long is async: must be a plain method"):
        transfers("ONE_TO_ALL")(wait_long)


def test_invalid_arguments_of_a_call_are_refused(group: WorkerGroup):
    with pytest.raises(TypeError, match="unexpected keyword argument 'more'"):
        group.double(put({"x": np.arange(4.0)}), more=3)
    figures = group.first()
    for use in (figures.load, (figures | put({"x": [1]})).get, (put({"x": [1]}) | figures).get):
        with pytest.raises(ValueError, match="expected a batch, got int: use put"):
            use()


@pytest.mark.slow
def test_a_group_that_meets_a_full_slot_releases_its_other_slots(pool: ResourcePool):
    pool = ResourcePool(2, cpus=0.5, groups=1)
    mesh = make_mesh("1-1-1")
    pool.acquire_slot(1)
    with pytest.raises(ConfigError, match="slot 1 of the pool is full: groups=1 share"):
        WorkerGroup(pool, Doubler, mesh=make_mesh("1-1-2"))
    first = WorkerGroup(pool, Doubler, mesh=mesh)
    assert first.first().get() == 0
    first.close()
    with pytest.raises(ActorError, match="Doubler: the group is closed and cannot be called"):
        first.first()
    second = WorkerGroup(pool, Doubler, mesh=mesh)
    pool.close()
    with pytest.raises(ActorError, match="Doubler: the pool is closed and cannot be called"):
        second.first()


@pytest.mark.parametrize(
    "settings", [{"cpus": -1.0}, {"cpus": 0.0}, {"groups": 0}], ids=["negative", "none", "groups"]
)
def test_invalid_slots_are_refused(pool: ResourcePool, settings: dict[str, Any]):
    with pytest.raises(ConfigError, match="Doubler: 5 ranks; the pool has 4 slots"):
        WorkerGroup(pool, Doubler, mesh=make_mesh("1-1-5"))
    with pytest.raises(ConfigError, match=r"pool: slots=1, .*: slots and groups must be at"):
        ResourcePool(1, **settings)


def test_a_worker_returns_its_failures_as_values():
    """Ray prints errors whose reference is dropped unread."""
    host, seat = WorkerHost(), (make_mesh("1-1-2"), ("localhost", 1), ())
    assert isinstance(host.build_worker(FailingToStart, 1, *seat), WorkerFailure)
    assert host.build_worker(Doubler, 0, *seat) is None
    result, failure = host.call_method("fail", [{"x": [1]}])
    assert result is None and isinstance(failure, WorkerFailure)


def test_errors_name_the_call_and_every_wait_has_a_deadline(group: WorkerGroup):
    with pytest.raises(ActorError, match=r"Doubler-(\d)\.fail: ValueError: not by rank \1"):
        group.fail(put({"x": np.arange(4.0)})).get()
    message = "doubel is not a method of the group; its methods: double, "
    with pytest.raises(AttributeError, match=message):
        group.doubel  # noqa: B018


class Saver(Doubler):
    """Worker with a method that may take longer than others."""

    @transfers("ONE_TO_ALL", timeout_s=60.0)
    def save(self) -> None:
        time.sleep(3.0)


@pytest.mark.slow
def test_a_hung_worker_is_reported_at_the_deadline_of_its_method(pool: ResourcePool):
    group = WorkerGroup(pool, Saver, mesh=make_mesh("1-1-1"), timeout_s=2.0)
    group.save().get()
    pending = group.sleep(60.0)
    with pytest.raises(DeadlineError, match=r"Saver\.sleep: no answer within 2 s from rank 0"):
        pending.get()
    group.close()


class Served(Doubler):
    """Worker with different layouts for serving and training."""

    @transfers("P3D_ALL_MICRO_DP")
    def serve(self, batch):
        return self.double(batch)

    @transfers(TransferProtocol(PROTOCOLS["ONE_TO_ALL"].distribute, lambda mesh, found: found[-1]))
    def last(self):
        return self._context.rank

    @transfers(TransferProtocol(lambda mesh, values: [()], lambda mesh, found: found))
    def miscounted(self):
        return 1

    @transfers("ONE_TO_ALL")
    def environment(self, name):
        return os.environ.get(name)

    @transfers("ALL_TO_ALL")
    def die_or_sleep(self, seconds):
        if seconds:
            time.sleep(seconds)
        else:
            os._exit(3)


def test_serving_layout_and_custom_protocol_differ_from_training(pool: ResourcePool):
    serving = RankGrid.from_text("1-1-2").assign_ranks()
    mesh = replace(make_mesh("1-2-1"), serving=serving)
    group = WorkerGroup(pool, Served, mesh=mesh, env={"SPECIAL": "yes"})
    batch = put({"x": np.arange(3.0)})
    # Training shards the model over both ranks; serving has a whole model on each rank.
    assert group.double(batch).load()["rank"].tolist() == [0, 0, 0]
    served = group.serve(batch).load()
    assert (served["x"].tolist(), served["rank"].tolist()) == ([0, 2, 4], [0, 0, 1])
    assert group.last().get() == 1
    with pytest.raises(ValueError, match=r"miscounted: .* distributed 1 calls to 2 ranks"):
        group.miscounted()
    assert group.environment("SPECIAL").get() == ["yes", "yes"]
    assert group.environment("OMP_NUM_THREADS").get() == ["1", "1"]
    # A death is reported before a timeout.
    with pytest.raises(ActorLostError, match=r"Served-1\.die_or_sleep: the actor died"):
        group.die_or_sleep([100.0, 0.0]).get()
    group.close()


class FailingToStart(Doubler):
    """Worker whose rank 1 fails to start."""

    def __init__(self, context: WorkerContext) -> None:
        if context.rank == 1:
            raise ConfigError("rank=1: must be another")


@pytest.mark.slow
def test_a_worker_that_fails_to_start_is_reported_and_frees_its_slot(pool: ResourcePool):
    for _ in range(4):
        WorkerGroup(pool, FailingToStart, mesh=make_mesh("1-1-2")).close()
    group = WorkerGroup(pool, FailingToStart, mesh=make_mesh("1-1-2"))
    with pytest.raises(ConfigError, match="rank=1: must be another"):
        group.first()
    group.close()


class Turning(Doubler):
    """Worker that records when it computes and when it offloads."""

    def __init__(self, context: WorkerContext, folder: str, *failing: bool) -> None:
        super().__init__(context)
        self._folder, self._failing = Path(folder), failing

    @transfers("ONE_TO_ALL")
    def work(self, name, seconds):
        self._note(f"+{name}")
        time.sleep(seconds)
        self._note(f"-{name}")

    @transfers("RANK_ZERO")
    def work_alone(self, name, seconds):
        self.work(name, seconds)

    def offload(self):
        if self._failing:
            raise StreamError("no space to offload")
        self._note("offload")

    def _note(self, text: str) -> None:
        with (self._folder / "notes").open("a") as file:
            file.write(text + "\n")


@pytest.fixture
def shared_pool(local_ray: None) -> Iterator[ResourcePool]:
    pool = ResourcePool(2, cpus=0.5, takes_turns=True)
    yield pool
    pool.close()


def test_groups_of_a_pool_take_turns_in_the_order_of_calls(
    shared_pool: ResourcePool, tmp_path: Path
):
    mesh = make_mesh("1-1-2")
    a = WorkerGroup(shared_pool, Turning, str(tmp_path), mesh=mesh, offloads=True)
    b = WorkerGroup(shared_pool, Turning, str(tmp_path), mesh=mesh)
    replies = [a.work_alone("a0", 0.3), a.work("a1", 0.1), b.work("b", 0.1), a.work("a2", 0.0)]
    replies[-1].get()
    notes = (tmp_path / "notes").read_text().split()
    # Rank 1 has no part in the first call, and need not wait for rank 0.
    assert [sorted(turn) for turn in (notes[:8], notes[8:12], notes[12:])] == [
        ["+a0", "+a1", "+a1", "-a0", "-a1", "-a1", "offload", "offload"],
        ["+b", "+b", "-b", "-b"],
        ["+a2", "+a2", "-a2", "-a2"],
    ]


def test_a_turn_that_does_not_end_is_reported_by_the_group_after_it(
    shared_pool: ResourcePool, tmp_path: Path
):
    mesh = make_mesh("1-1-1")
    hung = WorkerGroup(shared_pool, Turning, str(tmp_path), mesh=mesh, timeout_s=1.0)
    after = WorkerGroup(shared_pool, Turning, str(tmp_path), mesh=mesh)
    hung.work("long", 60.0)
    waiting = after.work("next", 0.0)
    with pytest.raises(DeadlineError, match=r"Turning.work and the end of its turn: no answer"):
        waiting.get()
    hung.close()
    # The devices are free once the group is closed.
    waiting.get()
    assert (tmp_path / "notes").read_text().split() == ["+long", "+next", "-next"]


def test_failing_and_impossible_offloads_are_reported(
    shared_pool: ResourcePool, pool: ResourcePool, tmp_path: Path
):
    mesh = make_mesh("1-1-1")
    failing = WorkerGroup(shared_pool, Turning, str(tmp_path), True, mesh=mesh, offloads=True)
    failing.work("first", 0.0).get()
    with pytest.raises(StreamError, match="no space to offload"):
        WorkerGroup(shared_pool, Doubler, mesh=mesh).first().get()
    with pytest.raises(ConfigError, match="Doubler: offloads=True: needs a method offload"):
        WorkerGroup(shared_pool, Doubler, mesh=mesh, offloads=True)
    with pytest.raises(ConfigError, match="Turning: offloads=True: needs a pool with takes_turns"):
        WorkerGroup(pool, Turning, str(tmp_path), mesh=mesh, offloads=True)
