"""Actors of a role, as the coordinator and the driver know them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.dataflow import CallKind, ModelCall


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
