"""Ray's exceptions as streamrl errors."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectStoreFullError,
    OutOfMemoryError,
    OwnerDiedError,
    RayTaskError,
)

from streamrl.actors.launch.local_ray import start_local_ray
from streamrl.actors.transport.ray_calls import gather_replies, translate_error
from streamrl.errors import ActorError, ActorLostError, ConfigError, RankLostError, RewardError


@pytest.mark.parametrize("error", [ConfigError("model.path=x: no"), RewardError("no verdict")])
def test_a_streamrl_error_of_an_actor_arrives_unchanged(error: Exception):
    nested = ExceptionGroup("tasks", [error])
    for cause in (error, nested):
        assert translate_error(RayTaskError("start", "", cause), "trainer-0.start") is error


def test_any_other_error_names_the_call():
    error = translate_error(RayTaskError("put", "", KeyError("lengths")), "shard-0.put")
    assert isinstance(error, ActorError)
    assert str(error).startswith("shard-0.put: KeyError: 'lengths'")


def test_other_ray_errors_become_one_line():
    text = "The node was running low on memory.\n" * 40
    error = translate_error(OutOfMemoryError(text), "generator-0.run")
    assert isinstance(error, ActorLostError)
    assert str(error) == "generator-0.run: Ray killed the actor because its node ran out of memory"
    assert "\n" not in str(translate_error(ObjectStoreFullError(text), "shard-0.put"))


def test_a_failed_cluster_start_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch):
    def init(**settings: object) -> None:
        raise Exception("The node timed out\nduring startup.")

    monkeypatch.setattr(ray, "init", init)
    reason = r"^Ray did not start: The node timed out during startup"
    with pytest.raises(ActorError, match=reason), start_local_ray(1, 1 << 27):
        pass


def test_a_dead_actor_and_its_owned_objects_are_lost():
    for error in (ActorDiedError(), ActorUnavailableError("closed", None)):
        translated = translate_error(error, "shard-0.take")
        assert isinstance(translated, ActorLostError)
        assert str(translated).startswith("shard-0.take: the actor died (")
    translated = translate_error(OwnerDiedError("ab", None, ""), "columns of a group")
    assert isinstance(translated, ActorLostError)
    assert str(translated) == "columns of a group: the actor that owned it died"


@pytest.mark.parametrize("how", ["the actor died", "another error"])
def test_the_error_of_the_dead_rank_wins_over_its_peers_errors(how: str):
    async def survive() -> None:
        raise RankLostError("lost another rank: Connection closed by peer")

    async def die() -> None:
        await asyncio.sleep(0.1)
        raise ActorLostError(how)

    with pytest.raises(ActorLostError, match=how):
        asyncio.run(_answers(survive(), die(), survive()))


def test_gathering_waits_only_briefly_for_the_error_of_a_lost_rank(monkeypatch: pytest.MonkeyPatch):
    async def survive() -> None:
        raise RankLostError("lost another rank")

    monkeypatch.setattr("streamrl.actors.transport.ray_calls.DEATH_NOTICE_S", 0.1)
    with pytest.raises(RankLostError):
        asyncio.run(_answers(survive(), asyncio.sleep(60)))


async def _answers(*replies: Awaitable[Any]) -> list[Any]:
    return await asyncio.wait_for(gather_replies(*replies), 10.0)


def test_gathered_replies_keep_the_order_of_ranks():
    async def answer(after_s: float) -> float:
        await asyncio.sleep(after_s)
        return after_s

    assert asyncio.run(_answers(answer(0.1), answer(0.0))) == [0.1, 0.0]
