"""Simulated queue: assignment of ready groups to waiting replicas."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl.dataflow import GENERATE_CALL, REWARD_CALL, build_dataflow
from streamrl.messages import ROLLOUT_COLUMNS, GroupInfo
from streamrl.planner.simulator.simulated_prompts import SimulatedPrompts
from streamrl.planner.simulator.simulated_queue import SimulatedGroup, SimulatedQueue
from tests.virtual_time import in_virtual_time

FLOW = build_dataflow((*ROLLOUT_COLUMNS, "scores"))


@dataclass(eq=False)
class Replica:
    """Replica that records its assigned groups."""

    slots: int
    groups: list[SimulatedGroup] = field(default_factory=list)

    def count_free_slots(self, stage: str) -> int:
        return self.slots - len(self.groups)

    def assign_groups(self, stage: str, groups: Sequence[SimulatedGroup]) -> None:
        self.groups += groups

    @property
    def orders(self) -> list[int]:
        return [group.admission_index for group in self.groups]


async def admit_groups(queue: SimulatedQueue, count: int) -> None:
    await queue.insert_prompts(SimulatedPrompts().draw_prompts(count), 0)


@in_virtual_time
async def test_waiting_replicas_share_ready_groups_in_admission_order():
    queue, replicas = SimulatedQueue(FLOW, hop_s=0.0), [Replica(4), Replica(4)]
    for replica in replicas:
        queue.request_groups(GENERATE_CALL.stage, replica)
    await admit_groups(queue, 5)
    assert [replica.orders for replica in replicas] == [[0, 1, 2], [3, 4]]


@in_virtual_time
async def test_a_filtered_group_goes_to_the_coordinator_once_scored():
    flow = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs"))
    queue = SimulatedQueue(flow, hop_s=0.0)
    generator, judge, reference = Replica(3), Replica(3), Replica(3)
    queue.request_groups(GENERATE_CALL.stage, generator)
    await admit_groups(queue, 3)
    generator.groups[1].is_filtered = True
    for group in generator.groups:
        group.info = GroupInfo((2,), 1, ((0, 1),))
    queue.commit_groups(GENERATE_CALL.stage, generator.groups)
    queue.request_groups(REWARD_CALL.stage, judge)
    queue.commit_groups(REWARD_CALL.stage, judge.groups)
    leased = await queue.lease_groups("train", max_groups=9, columns=(), wait_s=1.0)
    filtered = [
        experience.outcome is not None and experience.outcome.filtered for experience in leased
    ]
    queue.request_groups("reference", reference)
    queue.commit_groups("reference", reference.groups)
    ready = await queue.lease_groups("train", max_groups=9, columns=(), wait_s=1.0)
    orders = [experience.lease.token for experience in ready]
    judged, scored, filtered, trained = judge.orders, reference.orders, filtered, orders
    assert judged == [0, 1, 2]
    assert filtered == [True]
    assert scored == trained == [0, 2]
