"""An evaluation spreads over the replicas there are, while they come and go."""

from streamrl.actors.evaluator import InTurn
from streamrl.actors.reporting import RoleActors
from streamrl.dataflow import GENERATE


def test_each_replica_has_its_turn_and_none_that_has_left() -> None:
    role = RoleActors([GENERATE], ["generator-0", "generator-1"], ["a", "b"])
    replicas = InTurn(role)
    assert [replicas.next()[1] for _ in range(3)] == ["a", "b", "a"]
    role.join("generator-2", "c")
    assert [replicas.next()[1] for _ in range(4)] == ["b", "c", "a", "b"]
    role.leave("generator-2")
    role.leave("generator-0")
    assert [replicas.next() for _ in range(2)] == [("generator-1", "b")] * 2
    assert replicas.has("generator-1") and not replicas.has("generator-2")
