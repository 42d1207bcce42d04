"""One process with a trainer's rank and a generator, or a part of one."""

from operator import methodcaller
from typing import Any

from streamrl.actors.generator import GeneratorActor, PartActor
from streamrl.actors.liveness import Living
from streamrl.actors.shared_weights import Residence
from streamrl.actors.trainer import TrainerActor


class HybridActor(Living):
    """Hosts both; each is called as the actor it would be alone, see `Part`."""

    def __init__(self, leads: bool = True) -> None:
        """`leads` is whether the generator samples here, and not only computes along."""
        residence = Residence()
        generator = GeneratorActor(residence) if leads else PartActor(residence)
        self._parts = {"trainer": TrainerActor(residence), "generator": generator}

    async def on(self, part: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of one of them."""
        return await methodcaller(method, *arguments)(self._parts[part])


class Part:
    """The trainer or the generator of a HybridActor, to be called like an actor of its own."""

    def __init__(self, actor: Any, name: str) -> None:
        self.actor = actor
        self._name = name

    def __getattr__(self, method: str) -> "PartMethod":
        if method.startswith("_"):
            raise AttributeError(method)
        return PartMethod(self.actor, self._name, method)

    def __reduce__(self) -> Any:
        return Part, (self.actor, self._name)


class PartMethod:
    """A method of a part."""

    def __init__(self, actor: Any, part: str, method: str) -> None:
        self._actor, self._part, self._method = actor, part, method

    def remote(self, *arguments: Any) -> Any:
        """Call it; the reply."""
        return self._actor.on.remote(self._part, self._method, arguments)
