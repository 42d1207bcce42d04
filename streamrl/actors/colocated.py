"""One process with a trainer's rank and a generator, or a part of one."""

from operator import methodcaller
from typing import Any

from streamrl.actors.generator import FollowerRankActor, GeneratorActor
from streamrl.actors.liveness import PingableActor
from streamrl.actors.shared_weights import SharedWeights
from streamrl.actors.trainer import TrainerActor


class HybridActor(PingableActor):
    """Hosts both; each is called as the actor it would be alone, see `Part`."""

    def __init__(self, leads: bool = True) -> None:
        """`leads` is whether the generator samples here, and not only computes along."""
        residence = SharedWeights()
        generator = GeneratorActor(residence) if leads else FollowerRankActor(residence)
        self._role_actors = {"trainer": TrainerActor(residence), "generator": generator}

    async def call_role(self, part: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of one of them."""
        return await methodcaller(method, *arguments)(self._role_actors[part])


class HybridActorHandle:
    """The trainer or the generator of a HybridActor, to be called like an actor of its own."""

    def __init__(self, actor: Any, name: str) -> None:
        self.actor = actor
        self._name = name

    def __getattr__(self, method: str) -> "HybridMethodHandle":
        if method.startswith("_"):
            raise AttributeError(method)
        return HybridMethodHandle(self.actor, self._name, method)

    def __reduce__(self) -> Any:
        return HybridActorHandle, (self.actor, self._name)


class HybridMethodHandle:
    """A method of a part."""

    def __init__(self, actor: Any, part: str, method: str) -> None:
        self._actor, self._role, self._method = actor, part, method

    def remote(self, *arguments: Any) -> Any:
        """Call it; the reply."""
        return self._actor.call_role.remote(self._role, self._method, arguments)
