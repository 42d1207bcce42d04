"""Replica scaling, step by step, on a fake registry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from streamrl.actors.coordination.role_actors import RoleActors
from streamrl.actors.launch import elastic
from streamrl.actors.launch.elastic import PendingStarts, ReplicaScaler
from streamrl.config.run_config import load_config
from streamrl.dataflow import build_dataflow
from streamrl.errors import ActorLostError, ConfigError, DeadlineError, WeightsError
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.run_dir.control_requests import (
    LEAVE_TIMEOUT_S,
    PLACE_TIMEOUT_S,
    REQUESTS_FOLDER,
    ScaleAnswer,
    ScaleRequest,
    ScaleRequestInbox,
)
from tests.actors.fakes import RECIPE
from tests.virtual_time import ManualClock

START_S = 30.0
STALL_S = load_config(RECIPE).pipeline.stall_s
MODEL_BYTES = 140 * 10**9  # in bfloat16; in float32, at 100 MB/s, they take 2800 s


@dataclass
class FakeRegistry:
    """Actor registry whose replies are strings; replies in `errors` raise."""

    roles: dict[str, RoleActors] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    max_replicas: int = 8

    def check_capacity(self, counts: Mapping[str, int]) -> None:
        if max(counts.values()) > self.max_replicas:
            raise ConfigError(f"the cluster has {self.max_replicas}")

    def spawn_replica(self, role: str) -> tuple[str, Any]:
        names = [*self.roles[role].names, *self.spawned]
        name = next(n for i in range(99) if (n := f"{role}-{i}") not in names)
        self.spawned.append(name)
        return name, f"placed {name}"

    spawned: list[str] = field(default_factory=list)

    def describe_demand(self, role: str) -> str:
        return "asks for 1 GPU; 0 GPUs are free"

    def start_replica(self, name: str, role: str) -> Any:
        return f"started {name}"

    def register_replica(self, name: str, role: str) -> tuple[Any, Any]:
        self.roles[role].add_replica(name, name)
        return f"run {name}", f"serving {name}"

    def drain_replica(self, name: str, role: str) -> None:
        self.roles[role].remove_replica(name)
        self.drained.append(name)

    def remove_replica(self, name: str) -> None:
        self.removed.append(name)

    def reject_replica(self, name: str, role: str) -> None:
        self.roles[role].remove_replica(name)
        self.removed.append(name)

    kill_actor = remove_replica

    def fetch_reply(self, reply: Any, name: str) -> Any:
        if reply in self.errors:
            raise self.errors[reply]
        return 17


class FakeInbox(ScaleRequestInbox):
    """Inbox in memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.requests: list[ScaleRequest] = []
        self.answers: list[ScaleAnswer] = []

    def take_requests(self) -> list[ScaleRequest]:
        requests, self.requests = self.requests, []
        return requests

    def write_answer(self, request: str, answer: ScaleAnswer) -> None:
        self.answers.append(answer)


class Run:
    """A run with some generators, a scorer and a trainer."""

    def __init__(self, generators: int, folder: Path, *overrides: str) -> None:
        names = [f"generator-{i}" for i in range(generators)]
        calls = build_dataflow((*ROLLOUT_COLUMNS, "scores")).calls_by_role
        self.now = 0.0
        self.registry = FakeRegistry(
            {
                "generator": RoleActors(calls["generator"], names, list(names)),
                "reward": RoleActors(calls["reward"], ["reward-0"], ["reward-0"]),
                "policy": RoleActors(calls["policy"], ["trainer-0"], ["trainer-0"]),
            }
        )
        self.inbox = FakeInbox(folder)
        self.loops: dict[Any, str] = {f"run {name}": name for name in [*names, "reward-0"]}
        self.starting = PendingStarts(START_S, clock=lambda: self.now)
        self.events: list[tuple[str, Any]] = []
        self.scaling = ReplicaScaler(
            load_config(RECIPE, overrides),
            self.registry,  # type: ignore[arg-type]
            self.inbox,
            loops=self.loops,
            starting=self.starting,
            model_bytes=MODEL_BYTES,
            clock=lambda: self.now,
        )

    def ask(self, **counts: int) -> None:
        self.inbox.requests.append(ScaleRequest("id", counts))
        self.look()

    def look(self, after_s: float = 1.0) -> None:
        self.now += after_s
        self.scaling.poll_requests(self._note)

    def _note(self, event: Any) -> None:
        self.events.append((event.name, event.fields["actor"]))

    def reply(self, *replies: str) -> None:
        for reply in replies:
            assert reply in self.scaling
            with mock.patch.object(elastic, "fetch_reply", self.registry.fetch_reply):
                self.scaling.handle_reply(reply, self._note)
        self.look()

    @property
    def line(self) -> str:
        (answer,) = self.inbox.answers
        (line,) = answer.lines
        return f"{'done' if answer.is_done else 'failed'}: {line}"


def test_joining_replicas_are_placed_started_and_serve(tmp_path: Path):
    run = Run(2, tmp_path)
    run.ask(generator=4)
    for name in ("generator-2", "generator-3"):
        run.reply(f"placed {name}", f"started {name}")
        assert run.loops[f"run {name}"] == name, "the run watches the replica's loop"
        assert not run.inbox.answers
        run.reply(f"serving {name}")
    joined = [f"generator-{i} joined, serving version 17" for i in (2, 3)]
    assert run.line == f"done: generators: 2 -> 4 ({'; '.join(joined)})"
    assert run.events == [("joined", "generator-2"), ("joined", "generator-3")]
    # From now on, a failure concerns the run.
    assert not run.scaling.reject_if_joining("generator-2", "it died")
    assert not run.registry.removed


def test_replicas_with_the_highest_numbers_leave_and_their_loops_may_end(tmp_path: Path):
    run = Run(3, tmp_path)
    run.ask(generator=1)
    assert sorted(run.registry.drained) == ["generator-1", "generator-2"]
    assert set(run.loops.values()) == {"generator-0", "reward-0"}
    assert not run.registry.removed, "drained replicas are not yet removed"
    run.reply("run generator-2")
    # A replica has left if its loop ends or dies, or after a timeout.
    run.look(after_s=LEAVE_TIMEOUT_S + 1)
    run.look()
    assert run.line == "done: generators: 3 -> 1 (generator-2 left; generator-1 left)"
    assert run.registry.removed == ["generator-2", "generator-1"]


def test_a_restarting_replica_leaves_at_once(tmp_path: Path):
    run = Run(2, tmp_path)
    del run.loops["run generator-1"]
    run.starting.add_actor("back generator-1", "generator-1")
    run.ask(generator=1)
    run.look()
    assert run.line == "done: generators: 2 -> 1 (generator-1 left)"
    assert list(run.starting) == []


def test_a_failed_join_is_reported_and_the_run_goes_on(tmp_path: Path):
    run = Run(1, tmp_path)
    run.registry.errors["started generator-1"] = ActorLostError("generator-1: the actor died")
    run.ask(generator=4)
    run.reply("placed generator-1", "started generator-1", "placed generator-2")
    run.look(after_s=START_S + 0.5)
    assert not run.inbox.answers
    run.look(after_s=PLACE_TIMEOUT_S)
    run.look()
    assert run.line == (
        "failed: generators: 1 -> 1 (generator-1 cannot join: generator-1: the actor died;"
        " generator-2 cannot join: not ready within 30 s;"
        " generator-3 cannot join: not placed within 60 s: it asks for 1 GPU; 0 GPUs are free)"
    )
    assert run.registry.removed == ["generator-1", "generator-2", "generator-3"]
    assert run.events == []


@pytest.mark.parametrize("reported_by", ["its loops", "its answer", "timeout"])
def test_a_replica_that_never_serves_is_rejected_and_the_run_goes_on(
    tmp_path: Path, reported_by: str
):
    run = Run(1, tmp_path)
    run.registry.errors["serving generator-1"] = WeightsError("bucket 0: gone")
    run.ask(generator=2)
    run.reply("placed generator-1", "started generator-1")
    assert run.loops["run generator-1"] == "generator-1"
    match reported_by:
        case "its loops":
            del run.loops["run generator-1"]
            assert run.scaling.reject_if_joining("generator-1", "bucket 0: gone\nmore")
        case "its answer":
            run.reply("serving generator-1")
        case "timeout":
            run.look(after_s=STALL_S + 2799)
            assert not run.registry.removed
            run.look(after_s=2)
    run.look()
    reason = "bucket 0: gone"
    if reported_by == "timeout":
        reason = f"no version of the weights loaded within {STALL_S + 2800:g} s"
    assert run.line == f"failed: generators: 1 -> 1 (generator-1 cannot join: {reason})"
    assert run.registry.removed == ["generator-1"]
    assert run.registry.roles["generator"].names == ["generator-0"]
    assert set(run.loops.values()) == {"generator-0", "reward-0"}
    assert run.events == []


def test_changes_run_one_at_a_time(tmp_path: Path):
    run = Run(1, tmp_path)
    run.ask(generator=2)
    run.ask(generator=1)
    run.reply("placed generator-1", "started generator-1")
    assert run.registry.drained == []
    run.reply("serving generator-1")
    run.look()
    run.reply("run generator-1")
    assert [answer.lines[0] for answer in run.inbox.answers] == [
        "generators: 1 -> 2 (generator-1 joined, serving version 17)",
        "generators: 2 -> 1 (generator-1 left)",
    ]


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ({"generator": 2}, "done: generators: 2 -> 2 (nothing to do)"),
        ({"generator": 9}, "failed: the cluster has 8"),
        ({"value": 2}, "failed: this run has no value to scale; scalable: generators, scorers"),
        ({"policy": 2}, "failed: this run has no policy to scale; scalable: generators, scorers"),
    ],
)
def test_no_op_and_infeasible_requests_are_answered_at_once(
    tmp_path: Path, counts: dict[str, int], line: str
):
    run = Run(2, tmp_path)
    run.ask(**counts)
    assert run.line == line


def test_a_colocated_run_scales_scorers_but_not_generators(tmp_path: Path):
    run = Run(1, tmp_path, "placement.mode=colocated")
    run.ask(generator=2)
    assert run.line == (
        "failed: placement.mode=colocated: each of trainer.world_size=1 ranks has a generator in"
        " its process; generators cannot be scaled"
    )
    assert not run.registry.spawned
    run.inbox.answers.clear()
    run.ask(reward=2)
    assert run.registry.spawned == ["reward-1"]


def test_the_inbox_closes_when_the_run_ends(tmp_path: Path):
    run = Run(1, tmp_path)
    run.ask(generator=2)
    run.ask(generator=3)
    run.scaling.close()
    assert not (tmp_path / REQUESTS_FOLDER).exists()


def test_each_start_has_its_own_deadline_and_late_actors_are_named():
    clock = ManualClock()
    starting = PendingStarts(30.0, clock=clock)
    starting.add_actor("reply a", "generator-1")
    starting.add_actor("reply b", "generator-0")
    assert starting.actor_names == "generator-0, generator-1"
    clock.now = 20.0
    starting.add_actor("reply c", "reference-0")
    clock.now = 30.0
    starting.raise_if_late()
    clock.now = 31.0
    with pytest.raises(DeadlineError, match=r"^generator-0, generator-1: not ready within 30 s$"):
        starting.raise_if_late()
    assert starting.pop_actor("reply a") == "generator-1"
    assert starting.pop_actor("reply b") == "generator-0"
    starting.raise_if_late()
    assert list(starting) == ["reply c"]
    clock.now = 51.0
    with pytest.raises(DeadlineError, match=r"^reference-0: not ready within 30 s$"):
        starting.raise_if_late()
