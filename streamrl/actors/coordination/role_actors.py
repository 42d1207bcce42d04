"""Actors of a role, as the coordinator and the driver know them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.actors.transport.ray_calls import call_actor
from streamrl.dataflow import CallKind, ModelCall
from streamrl.errors import ActorLostError, DeadlineError
from streamrl.user_code.service_gate import Outage

WAITS_TIMEOUT_S = 3.0
"""Longest time by which a hung actor delays the report of a stall or an outage."""


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


async def describe_waits(roles: Sequence[RoleActors]) -> str:
    """Describe what the generators' open episodes wait for; leave out hung and dead generators."""
    generators = [role for role in roles if role.kind is CallKind.GENERATE]
    answers = [await _ask_replicas(role, "describe_waits", "") for role in generators]
    waiting = [f"{name}: {waits}" for each in answers for name, waits in each.items() if waits]
    return "; ".join(waiting)


async def find_outages(roles: Sequence[RoleActors]) -> list[Outage]:
    """Return the outages of services that the actors of the serving roles wait for."""
    serving = [role for role in roles if role.kind is not CallKind.TRAIN]
    answers = await asyncio.gather(*(_ask_replicas(role, "list_outages", ()) for role in serving))
    return [o for answer in answers for outages in answer.values() for o in outages]


async def _ask_replicas(role: RoleActors, method: str, default: Any) -> dict[str, Any]:
    """Return the answer of each actor by name; `default` for hung and dead ones."""

    async def ask(name: str, actor: Any) -> Any:
        try:
            return await call_actor(actor, name, method, timeout_s=WAITS_TIMEOUT_S)
        except (ActorLostError, DeadlineError):
            return default

    names, actors = [*role.names], [*role.actors]
    return dict(zip(names, await asyncio.gather(*map(ask, names, actors)), strict=True))
