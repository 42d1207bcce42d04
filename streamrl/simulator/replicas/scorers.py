"""Simulated score replica: leases groups and scores them batch by batch."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.dataflow import EMA_REFERENCE, ModelCall
from streamrl.placement.stage_timings import WeightsTiming
from streamrl.simulator.replicas.context import SimulationContext
from streamrl.simulator.replicas.cpu_model import CpuTimer
from streamrl.simulator.replicas.device_hold import SimulatedDeviceHold
from streamrl.simulator.replicas.simulated_queue import SimulatedGroup
from streamrl.simulator.replicas.weight_followers import WeightPuller
from streamrl.stream.device_lease import DedicatedDeviceLease


@dataclass(frozen=True, eq=False)
class ScoreBatch:
    """Groups that a scorer scores in one batch for a stage."""

    stage: str
    groups: Sequence[SimulatedGroup]

    @property
    def newest_version(self) -> int:
        return max(group.admitted_version for group in self.groups)


class SimulatedScorer:
    """Simulated scorer, which serves all stages of a role.

    It leases at most two batches per stage: one in computation, one prefetched.
    """

    def __init__(
        self, process: str, calls: Sequence[ModelCall], context: SimulationContext, *, holder: str
    ) -> None:
        """Create a scorer; `holder` is a new name for the device arbiter."""
        self.process = process
        self._context = context
        self._calls = {call.stage: call for call in calls}
        self._free_slots = {stage: 2 * context.timings.score[stage].batch for stage in self._calls}
        self._recorder = context.recordings.get_recorder(process)
        lease = context.leases.make_lease(calls[0].role, holder)
        self._device_hold = SimulatedDeviceHold(calls[0].stage, lease, self._start_next_batch)
        self._weight_puller: WeightPuller | None = None
        if calls[0].followed_role:
            timing = context.timings.weights.get(calls[0].stage, WeightsTiming())
            registry = context.registries[calls[0].followed_role]
            self._weight_puller = WeightPuller(
                self, timing, registry, lease or DedicatedDeviceLease(), self._recorder
            )
        self._awaiting_version: list[ScoreBatch] = []
        self._ready_batches: deque[ScoreBatch] = deque()
        self._timer: CpuTimer | None = None
        self._is_busy = self._is_dead = False

    def start(self) -> None:
        if self._weight_puller is not None:
            self._weight_puller.start()
        else:
            self.on_version_loaded()

    def _find_required_version(self, version: int) -> int:
        is_ema_reference = next(iter(self._calls.values())).followed_role == EMA_REFERENCE
        return (
            self._context.reference.find_reference_version(version) if is_ema_reference else version
        )

    def kill(self) -> int:
        """Crash the scorer and requeue its groups. Returns 0, the number of sampled tokens lost."""
        self._is_dead = True
        self._device_hold.close()
        if self._weight_puller is not None:
            self._weight_puller.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._is_busy:
            self._context.cpu.adjust_busy(-1)
        self._recorder.close_spans()
        self._context.queue.requeue_groups(self)
        return 0

    def count_free_slots(self, stage: str) -> int:
        return 0 if self._is_dead else self._free_slots[stage]

    def assign_groups(self, stage: str, groups: Sequence[SimulatedGroup]) -> None:
        self._free_slots[stage] -= len(groups)
        size = self._context.timings.score[stage].batch
        self._enqueue_batches(
            [ScoreBatch(stage, groups[i : i + size]) for i in range(0, len(groups), size)]
        )

    def _enqueue_batches(self, batches: Sequence[ScoreBatch]) -> None:
        for batch in batches:
            if (
                self._weight_puller is not None
                and self._find_required_version(batch.newest_version)
                > self._weight_puller.loaded_version
            ):
                self._awaiting_version.append(batch)
            else:
                self._ready_batches.append(batch)
                self._device_hold.begin_work()

    async def load_version(self, version: int, pause_s: float) -> None:
        await self._context.cpu.wait_until(self._context.cpu.now + pause_s)

    def on_version_loaded(self) -> None:
        waiting_batches, self._awaiting_version = self._awaiting_version, []
        self._enqueue_batches(waiting_batches)
        for stage, free_slots in self._free_slots.items():
            if free_slots:
                self._context.queue.request_groups(stage, self)

    def _start_next_batch(self) -> None:
        if self._is_busy or not self._ready_batches or not self._device_hold.is_held:
            return
        batch, cpu = self._ready_batches.popleft(), self._context.cpu
        rollouts, tokens = self._count_batch_tokens(batch)
        span_args = {"groups": len(batch.groups), "rollouts": rollouts, "tokens": tokens}
        lane = self._recorder.begin_span(batch.stage, span_args)
        self._is_busy = True
        cpu.adjust_busy(1)
        at = cpu.now + self._context.timings.score[batch.stage].batch_duration_s(rollouts, tokens)
        self._timer = cpu.call_at(at, lambda: self._finish_batch(batch, lane))

    def _count_batch_tokens(self, batch: ScoreBatch) -> tuple[int, int]:
        groups = batch.groups
        if "greedy_ids" in self._calls[batch.stage].needs:
            return len(groups), sum(group.greedy_tokens for group in groups)
        infos = [group.info for group in groups if group.info is not None]
        return sum(len(info.lengths) for info in infos), sum(info.num_tokens for info in infos)

    def _finish_batch(self, batch: ScoreBatch, lane: int) -> None:
        """Commit the scored groups of a batch, start the next batch, and request more groups.

        lane: lane of the batch's span.
        """
        self._is_busy = False
        self._context.cpu.adjust_busy(-1)
        self._recorder.end_span(lane)
        self._free_slots[batch.stage] += len(batch.groups)
        self._device_hold.end_work()
        self._start_next_batch()
        self._context.queue.commit_groups(batch.stage, batch.groups)
        self._context.queue.request_groups(batch.stage, self)
