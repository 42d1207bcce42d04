"""Actors of a role, as the coordinator and the driver know them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.actors.transport.ray_calls import await_reply
from streamrl.dataflow import CallKind, ModelCall
from streamrl.errors import ActorLostError, DeadlineError

WAITS_TIMEOUT_S = 3.0
"""Longest time by which a hung generator delays the report of a stall."""


@dataclass(frozen=True)
class RoleActors:
    """Actors of a role with their names; every actor serves all model calls in `calls`.

    The lists of names and actors change as replicas join and leave.
    """

    calls: Sequence[ModelCall]
    names: list[str]
    actors: list[Any]

    @property
    def role(self) -> str:
        return self.calls[0].role

    @property
    def kind(self) -> CallKind:
        return self.calls[0].kind

    def add_replica(self, name: str, actor: Any) -> None:
        self.names.append(name)
        self.actors.append(actor)

    def remove_replica(self, name: str) -> None:
        if name in self.names:
            index = self.names.index(name)
            del self.names[index], self.actors[index]


async def describe_waits(generators: RoleActors) -> str:
    """Describe what the generators' open episodes wait for; leave out hung and dead generators."""

    async def ask(name: str, actor: Any) -> str:
        reply = actor.describe_waits.remote()
        try:
            waits = await await_reply(reply, f"{name}.describe_waits", WAITS_TIMEOUT_S)
        except (ActorLostError, DeadlineError):
            return ""
        return f"{name}: {waits}" if waits else ""

    answers = await asyncio.gather(*map(ask, generators.names, generators.actors))
    return "; ".join(filter(None, answers))
