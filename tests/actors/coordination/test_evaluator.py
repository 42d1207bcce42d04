"""Evaluation on the run's replicas, which may join and leave, and what replicas wait for."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from streamrl.actors.coordination.evaluator import RunEvaluator
from streamrl.actors.coordination.role_actors import RoleActors, describe_waits
from streamrl.config.run_config import RunConfig, RunSettings
from streamrl.dataflow import GENERATE_CALL, REWARD_CALL
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.errors import DeadlineError, GenerationError
from streamrl.messages import Array, Experience, Prompt, rollouts_to_columns
from streamrl.planner.simulator.virtual_loop import run_virtual
from streamrl.stream.evaluation.metrics import EvaluationResult
from streamrl.stream.evaluation.sample_and_score import SampledPrompt
from streamrl.stream.run_state import PipelineConfig
from streamrl.telemetry.progress import WorkStatus
from tests.actors.fakes import FakeActor, make_config
from tests.rollouts import make_rollout
from tests.virtual_time import in_virtual_time


class Replica:
    """Replica that is both generator and scorer, each of which takes a number of seconds.

    hangs_at: time from which the replica answers no ping.
    """

    def __init__(
        self,
        seconds: float,
        *,
        dies: bool = False,
        score_s: float = 0.0,
        hangs_at: float = math.inf,
    ) -> None:
        self._seconds, self._dies, self._score_s = seconds, dies, score_s
        self._hangs_at = hangs_at

    async def ping(self) -> None:
        if asyncio.get_running_loop().time() >= self._hangs_at:
            await asyncio.Event().wait()

    async def sample(self, prompt: Prompt, seeds: Sequence[int], *_: Any) -> SampledPrompt:
        await asyncio.sleep(self._seconds)
        if self._dies:
            self._dies = False
            raise GenerationError("the replica is about to be restarted")
        rollouts = [make_rollout(prompt.token_ids, [1]) for _ in seeds]
        return SampledPrompt(rollouts_to_columns(rollouts))

    async def score(self, groups: Sequence[Experience]) -> list[dict[str, Array]]:
        await asyncio.sleep(self._score_s)
        return [{"scores": np.ones(4, np.float32)} for _ in groups]


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GeneratorConfig, "request_timeout_s", 10.0)


def make_run_config(max_restarts: int = 3) -> RunConfig:
    run = RunSettings(max_restarts=max_restarts)
    return make_config(pipeline=PipelineConfig(stall_s=10.0), run=run)


def test_round_robin_follows_joining_and_leaving_replicas():
    role = RoleActors([GENERATE_CALL], ["generator-0", "generator-1"], ["a", "b"])
    evaluator = RunEvaluator(make_run_config(), {})
    assert [evaluator.choose_replica(role)[1] for _ in range(3)] == ["a", "b", "a"]
    role.add_replica("generator-2", "c")
    assert [evaluator.choose_replica(role)[1] for _ in range(4)] == ["b", "c", "a", "b"]
    role.remove_replica("generator-2")
    role.remove_replica("generator-0")
    assert [evaluator.choose_replica(role) for _ in range(2)] == [("generator-1", "b")] * 2


def test_prompts_of_a_generator_that_leaves_are_sampled_by_another():
    """Without restarts, too: the generator has not died."""
    leaving, staying = FakeActor(Replica(5.0, dies=True)), FakeActor(Replica(5.0))
    sampling = RoleActors([GENERATE_CALL], ["generator-0", "generator-1"], [leaving, staying])
    scoring = RoleActors([REWARD_CALL], ["reward-0"], [staying])
    config = make_run_config(max_restarts=0)
    prompts = [Prompt(f"0:{i}:0", np.array([1], np.int32)) for i in range(4)]
    status = WorkStatus("evaluating", len(prompts), "prompts")

    async def main() -> EvaluationResult:
        evaluator = RunEvaluator(config, {r.role: r for r in (sampling, scoring)})
        evaluation = asyncio.create_task(
            evaluator.run_evaluation({"held_out": prompts}, version=0, on_scored=status.advance)
        )
        await asyncio.sleep(1.0)
        sampling.remove_replica("generator-0")
        return await evaluation

    result = run_virtual(main())
    assert (result.num_prompts, result.num_unscored, result.num_unscored_samples) == (4, 0, 0)
    assert status.completed == 4


def evaluate_with(replica: Replica) -> EvaluationResult:
    calls, replicas = (GENERATE_CALL, REWARD_CALL), [FakeActor(replica)]
    roles = {call.role: RoleActors([call], [call.role], replicas) for call in calls}
    prompts = {"held_out": [Prompt("0:0:0", np.array([1], np.int32))]}
    return run_virtual(RunEvaluator(make_run_config(), roles).run_evaluation(prompts, version=0))


def test_a_call_takes_any_time_while_its_replica_answers():
    """Such as for long completions, queueing in the scorer, or the outage of a service."""
    assert evaluate_with(Replica(5000.0, dies=True, score_s=5000.0)).pass_at_1 == 1.0


@pytest.mark.parametrize(
    ("sample_s", "call"), [(5000.0, "generator.sample"), (0.0, "reward.score")]
)
def test_an_evaluation_ends_once_a_replica_no_longer_answers(sample_s: float, call: str):
    replica = Replica(sample_s, score_s=5000.0, hangs_at=1000.0)
    with pytest.raises(DeadlineError, match=rf"^{call}: ping: no answer within 20 s$"):
        evaluate_with(replica)


class Waiter:
    """Generator that describes its waits after some seconds."""

    def __init__(self, waits: str, seconds: float = 0.0) -> None:
        self._waits, self._seconds = waits, seconds

    async def describe_waits(self) -> str:
        await asyncio.sleep(self._seconds)
        return self._waits


@in_virtual_time
async def test_waits_are_those_of_generators_that_answer():
    waiters = [Waiter("1 of 2 open episodes wait"), Waiter(""), Waiter("too late", 1e6)]
    names = [f"generator-{i}" for i in range(3)]
    generators = RoleActors([GENERATE_CALL], names, [*map(FakeActor, waiters)])
    assert await describe_waits([generators]) == "generator-0: 1 of 2 open episodes wait"
    assert asyncio.get_running_loop().time() < 10.0
