"""Hybrid actor: a trainer rank and a generator rank in one process."""

from operator import methodcaller
from types import SimpleNamespace
from typing import Any

from streamrl.actors.generator import FollowerRankActor, GeneratorActor
from streamrl.actors.liveness import PingableActor
from streamrl.actors.shared_weights import SharedWeights
from streamrl.actors.trainer import TrainerActor


class HybridActor(PingableActor):
    """Actor that hosts a TrainerActor and a generator actor, which share the weights in place.

    Callers address either actor by a HybridActorHandle.
    """

    def __init__(self, leads: bool = True) -> None:
        """Create the hosted actors.

        leads: host a GeneratorActor, which runs the engine; otherwise a FollowerRankActor, which
        computes for a generator that another process leads.
        """
        shared_weights = SharedWeights()
        generator = GeneratorActor(shared_weights) if leads else FollowerRankActor(shared_weights)
        self._role_actors = {"trainer": TrainerActor(shared_weights), "generator": generator}

    async def call_role(self, role: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the hosted actor of a role, "trainer" or "generator"."""
        return await methodcaller(method, *arguments)(self._role_actors[role])


class HybridActorHandle:
    """Handle of the trainer or of the generator in a HybridActor, used like a Ray actor handle."""

    def __init__(self, actor: Any, role: str) -> None:
        self.actor = actor
        self._role = role

    def __getattr__(self, method: str) -> SimpleNamespace:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*arguments: Any) -> Any:
            return self.actor.call_role.remote(self._role, method, arguments)

        return SimpleNamespace(remote=call)

    def __reduce__(self) -> Any:
        return HybridActorHandle, (self.actor, self._role)
