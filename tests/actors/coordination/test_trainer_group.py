"""Trainer group: collectives start in the same order on every rank."""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.actors.coordination.role_actors import RoleActors
from streamrl.actors.coordination.trainer_group import TrainerGroup
from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.correction import CorrectionConfig
from streamrl.buffer.micro_batch_schedule import ScheduledRound
from streamrl.dataflow import CRITIC, POLICY
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import DeadlineError, WeightsError
from streamrl.messages import Experience, GroupLease
from streamrl.weights import WeightManifest, WeightsConfig
from tests.actors.fakes import make_config
from tests.virtual_time import in_virtual_time


class Rank:
    """Trainer rank whose calls take `call_s` seconds; logs their starts and ends."""

    def __init__(self, call_s: float = 1.0) -> None:
        self._call_s = call_s
        self.log: list[str] = []
        self.calls: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        manifest = WeightManifest(1, (), ())
        self.replies: dict[str, Any] = {"publish_weights": manifest, "publish_reference": manifest}
        self.replies["train_micro_batch"] = {}

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._answer, method))

    async def _answer(self, method: str, *arguments: object) -> Any:
        self.calls[method].append(arguments)
        self.log.append(f"{method} begins")
        await asyncio.sleep(self._call_s)
        self.log.append(f"{method} ends")
        reply = self.replies.get(method)
        if isinstance(reply, Exception):
            raise reply
        return reply


def group(
    ranks: list[Rank],
    *,
    role: str = POLICY,
    model_bytes: int = 0,
    zero_stage: int = 1,
    algorithm: AlgorithmConfig | None = None,
    **trainer: Any,
) -> TrainerGroup:
    config = make_config(
        trainer=TrainerConfig(zero_stage=zero_stage, world_size=len(ranks), **trainer),
        weights=WeightsConfig(probe_every=4),
        algorithm=algorithm or AlgorithmConfig(),
    )
    names = [f"trainer-{i}" for i in range(len(ranks))]
    actors = RoleActors(config.dataflow.calls_by_role[role], names, ranks)
    return TrainerGroup(actors, config, model_bytes)


@pytest.mark.parametrize("zero_stage", [1, 3])
@in_virtual_time
async def test_a_model_and_its_ema_reference_are_published_one_after_the_other(zero_stage: int):
    ranks = [Rank(), Rank()]
    trainer = group(ranks, zero_stage=zero_stage)
    await asyncio.gather(trainer.publish_weights(1, {}), trainer.publish_reference(1, {}))
    first, second = "publish_weights", "publish_reference"
    expected = [f"{first} begins", f"{first} ends", f"{second} begins", f"{second} ends"]
    assert [rank.log for rank in ranks] == [expected] * 2


@pytest.mark.parametrize("method", ["publish_weights", "publish_reference"])
@in_virtual_time
async def test_the_deadline_of_a_publish_grows_with_the_bytes_of_the_model(method: str):
    # 140 GB at 100 MB/s, where the files are in bfloat16 and the trainer in float32.
    publish_s = 2800.0
    large = group([Rank(publish_s)], model_bytes=140 * 10**9)
    assert isinstance(await getattr(large, method)(1, []), WeightManifest)
    small = group([Rank(publish_s)], model_bytes=10**9)
    with pytest.raises(DeadlineError, match=f"trainer-0.*{method}"):
        await getattr(small, method)(1, [])


@pytest.mark.parametrize(("zero_stage", "waits"), [(1, False), (3, True)])
@pytest.mark.parametrize("publishes_first", [True, False])
@in_virtual_time
async def test_a_round_and_a_publish_that_gathers_parameters_wait_for_each_other(
    zero_stage: int, waits: bool, publishes_first: bool
):
    ranks = [Rank(), Rank()]
    trainer = group(ranks, zero_stage=zero_stage)
    works: list[Coroutine[Any, Any, Any]] = [
        trainer.publish_weights(1, {}),
        trainer.train_round(((), ()), epoch=0),
    ]
    names = ["publish_weights", "train_micro_batch"]
    if not publishes_first:
        works.reverse()
        names.reverse()
    first = asyncio.create_task(works[0])
    await asyncio.sleep(0.5)
    await works[1]
    await first
    for rank in ranks:
        is_apart = rank.log.index(f"{names[1]} begins") > rank.log.index(f"{names[0]} ends")
        assert is_apart is waits


@in_virtual_time
async def test_all_ranks_agree_which_versions_get_a_logprob_check_also_on_retries():
    ranks = [Rank(), Rank()]
    trainer = group(ranks, zero_stage=3)
    manifest, broken = ranks[0].replies["publish_weights"], WeightsError("the disk is full")
    retries = [(8, broken), (8, manifest), (8, manifest), (9, manifest), (9, manifest)]
    for version, reply in [(0, manifest), (4, manifest), *retries, (10, manifest)]:
        ranks[0].replies["publish_weights"] = reply
        try:
            await trainer.publish_weights(version, {})
        except WeightsError:
            assert reply is broken
    for rank in ranks:
        calls = rank.calls["publish_weights"]
        checked = [(version, should_check) for version, _, should_check in calls]
        retried = [(8, True), (8, True), (8, True), (9, False), (9, False)]
        assert checked == [(0, True), (4, True), *retried, (10, True)]


@in_virtual_time
async def test_tensor_parallel_ranks_train_the_same_micro_batch_and_count_once():
    ranks = [Rank() for _ in range(4)]
    for i, rank in enumerate(ranks):
        rank.replies["train_micro_batch"] = {"num_tokens": 10.0 ** (i // 2)}
    trainer = group(ranks, backend="torch", tensor_parallel=2)
    assert trainer.dp_size == 2
    micro_batches = ((("a", 0), ("a", 1)), (("b", 0),))
    sums = await trainer.train_round(micro_batches, epoch=0)
    expected = [micro_batches[0], micro_batches[0], micro_batches[1], micro_batches[1]]
    assert [rank.calls["train_micro_batch"][0][0] for rank in ranks] == expected
    assert sums == {"num_tokens": 11.0}


@pytest.mark.parametrize(("epochs", "recomputes"), [(1, False), (2, True)])
@in_virtual_time
async def test_logprobs_are_precomputed_in_the_first_of_several_epochs(
    epochs: int, recomputes: bool
):
    ranks = [Rank(), Rank()]
    algorithm = AlgorithmConfig(epochs=epochs, correction=CorrectionConfig(proximal="trainer"))
    trainer = group(ranks, algorithm=algorithm)
    micro_batches = ((("a", 0),), (("b", 0),))
    rounds = [ScheduledRound(micro_batches, epoch) for epoch in range(epochs)]
    assert len(trainer.select_precomputed(rounds)) == recomputes
    await trainer.plan_step(["a", "b"], rounds)
    planned = [call[1] for rank in ranks for call in rank.calls["plan_step"]]
    assert planned == ([[picks] for picks in micro_batches] if recomputes else [])


@pytest.mark.parametrize(("mini_batches", "waits"), [(1, False), (2, True)])
@in_virtual_time
async def test_ranks_score_no_group_between_two_updates_of_a_step(mini_batches: int, waits: bool):
    ranks = [Rank(), Rank()]
    for rank in ranks:
        rank.replies["update"] = {}
    algorithm = AlgorithmConfig(name="ppo", mini_batches=mini_batches)
    trainer = group(ranks, role=CRITIC, algorithm=algorithm)
    trainer.begin_step(0, {})
    lease = GroupLease(1, "0:0:0", "value", 1, 10.0)
    await trainer.apply_update({})
    scoring = asyncio.create_task(trainer.score_groups("value", [Experience(lease, 0)]))
    await asyncio.sleep(2.5)
    assert scoring.done() is not waits
    for _ in range(mini_batches - 1):
        await trainer.train_round(((), ()), epoch=0)
        await trainer.apply_update({})
    await scoring
    last = max(i for i, line in enumerate(ranks[0].log) if line == "update ends")
    assert ranks[0].log.index("score_groups begins") > last
    assert [rank.calls["score_groups"] for rank in ranks] == [[("value", [lease])], [("value", [])]]
