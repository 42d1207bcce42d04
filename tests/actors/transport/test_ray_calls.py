"""Ray's exceptions as streamrl errors."""

import asyncio
import re
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
    RayError,
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


TEXT = "The node was running low on memory.\n" * 40


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (RayTaskError("put", "", KeyError("lengths")), ActorError, r"KeyError: 'lengths'"),
        (ActorDiedError(), ActorLostError, r"the actor died \(.*\)"),
        (ActorUnavailableError("closed", None), ActorLostError, r"the actor died \(.*\)"),
        (OwnerDiedError("ab", None, ""), ActorLostError, "the actor that owned it died"),
        (OutOfMemoryError(TEXT), ActorLostError, "Ray killed the actor because .* out of memory"),
        (ObjectStoreFullError(TEXT), ActorError, "ObjectStoreFullError: .*"),
    ],
)
def test_any_other_error_names_the_call_in_its_first_line(
    error: RayError, kind: type[Exception], line: str
):
    translated = translate_error(error, "shard-0.put")
    assert type(translated) is kind
    first, *others = str(translated).splitlines()
    assert re.fullmatch(f"shard-0.put: {line}", first)
    assert not others or isinstance(error, RayTaskError)


def test_a_failed_cluster_start_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch):
    def init(**settings: object) -> None:
        raise Exception("The node timed out\nduring startup.")

    monkeypatch.setattr(ray, "init", init)
    reason = r"^Ray did not start: The node timed out during startup"
    with pytest.raises(ActorError, match=reason), start_local_ray(1, 1 << 27):
        pass


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
