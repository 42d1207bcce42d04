"""Ray options of actors, without Ray."""

from typing import Any, cast

import pytest

from streamrl.actors.actor_context import ActorContext
from streamrl.actors.coordination.role_actors import RoleActors
from streamrl.actors.launch.actor_registry import ActorRegistry
from streamrl.algorithms.config import AlgorithmConfig
from streamrl.dataflow import REFERENCE_CALL
from streamrl.engines.trainer_config import ReferenceConfig
from streamrl.placement.config import PlacementConfig
from tests.actors.fakes import make_config, make_prepared


class FakeLeader:
    """Actor whose method `start` keeps the options of the other ranks."""

    def __init__(self) -> None:
        self.start = self
        self.peer_options: list[dict[str, Any]] = []

    def options(self, **_: Any) -> "FakeLeader":
        return self

    def remote(self, _context: Any, _replica: int, _calls: Any, peer_options: Any) -> str:
        self.peer_options = peer_options
        return "started"


@pytest.mark.parametrize(("address", "cpus"), [("", 0), ("auto", 1)])
def test_ranks_of_an_added_replica_take_cpu_slots_on_an_existing_cluster_only(
    address: str, cpus: int, model_path: str
):
    config = make_config(
        model_path,
        algorithm=AlgorithmConfig(name="grpo", kl_coef=0.1),
        reference=ReferenceConfig(world_size=3, replicas=1),
        placement=PlacementConfig(address=address),
    )
    registry = ActorRegistry(config, make_prepared(config), on_gpu=False)
    first, added = FakeLeader(), FakeLeader()
    registry.actors = {"reference-0": first, "reference-1": added}
    registry.roles = {"reference": RoleActors([REFERENCE_CALL], ["reference-0"], [first])}
    registry.start_actors(cast(ActorContext, "context"), None)
    assert [options["num_cpus"] for options in first.peer_options] == [1, 1]
    registry.start_replica("reference-1", "reference")
    assert [options["num_cpus"] for options in added.peer_options] == [cpus, cpus]
