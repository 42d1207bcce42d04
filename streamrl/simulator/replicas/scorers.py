"""A scorer replica: takes groups in batches, computes one batch after the other."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.dataflow import MOVED, Call
from streamrl.placement.stage_timings import WeightsTiming
from streamrl.simulator.replicas.context import Site
from streamrl.simulator.replicas.cpu_model import Timer
from streamrl.simulator.replicas.device_hold import Holding
from streamrl.simulator.replicas.queue import Group
from streamrl.simulator.replicas.weight_followers import Following
from streamrl.stream.device_lease import FreeLease


@dataclass(frozen=True, eq=False)
class Batch:
    """Groups that are scored together."""

    stage: str
    groups: Sequence[Group]

    @property
    def version(self) -> int:
        """The newest that any of them was admitted at."""
        return max(group.admitted_version for group in self.groups)


class ScorerReplica:
    """Serves all stages of a role; it has two batches of each at most, one of which it computes."""

    def __init__(self, process: str, calls: Sequence[Call], site: Site, *, holder: str) -> None:
        """`holder` is its name among those who share devices, unlike any before."""
        self.process = process
        self._site = site
        self._calls = {call.stage: call for call in calls}
        self._room = {stage: 2 * site.timings.score[stage].batch for stage in self._calls}
        self._recorder = site.recording.of(process)
        lease = site.leases.of(calls[0].role, holder)
        self._holding = Holding(calls[0].stage, lease, self._granted)
        self._following: Following | None = None
        if calls[0].follows:
            timing = site.timings.weights.get(calls[0].stage, WeightsTiming())
            versions = site.versions[calls[0].follows]
            self._following = Following(
                self, timing, versions, lease or FreeLease(), self._recorder
            )
        self._early: list[Batch] = []
        self._ready: deque[Batch] = deque()
        self._timer: Timer | None = None
        self._is_busy = self._is_dead = False

    def start(self) -> None:
        """Take groups, if it follows a model once a version is there."""
        if self._following is not None:
            self._following.start()
        else:
            self.arrived()

    def _due(self, version: int) -> int:
        """What must be held at least for what was admitted at a version."""
        is_moved = next(iter(self._calls.values())).follows == MOVED
        return self._site.reference.version_for(version) if is_moved else version

    def die(self) -> int:
        """What it was at is handed out again; no token is lost."""
        self._is_dead = True
        self._holding.close()
        if self._following is not None:
            self._following.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._is_busy:
            self._site.machine.occupy(-1)
        self._recorder.close()
        self._site.queue.release(self)
        return 0

    def room(self, stage: str) -> int:
        """How many groups more it may be given."""
        return 0 if self._is_dead else self._room[stage]

    def give(self, stage: str, groups: Sequence[Group]) -> None:
        """It has these from now on."""
        self._room[stage] -= len(groups)
        size = self._site.timings.score[stage].batch
        self._enter([Batch(stage, groups[i : i + size]) for i in range(0, len(groups), size)])

    def _enter(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            if self._following is not None and self._due(batch.version) > self._following.held:
                self._early.append(batch)
            else:
                self._ready.append(batch)
                self._holding.begin()

    async def load(self, version: int, pause_s: float) -> None:
        """Go over to this version."""
        await self._site.machine.until(self._site.machine.now + pause_s)

    def arrived(self) -> None:
        """A version is held."""
        early, self._early = self._early, []
        self._enter(early)
        for stage, room in self._room.items():
            if room:
                self._site.queue.wait(stage, self)

    def _granted(self) -> None:
        """Compute the next batch, if the devices are there and free."""
        if self._is_busy or not self._ready or not self._holding.has:
            return
        batch, machine = self._ready.popleft(), self._site.machine
        rollouts, tokens = self._size(batch)
        facts = {"groups": len(batch.groups), "rollouts": rollouts, "tokens": tokens}
        lane = self._recorder.begin(batch.stage, facts)
        self._is_busy = True
        machine.occupy(1)
        at = machine.now + self._site.timings.score[batch.stage].batch_of(rollouts, tokens)
        self._timer = machine.call_at(at, lambda: self._finish(batch, lane))

    def _size(self, batch: Batch) -> tuple[int, int]:
        """Rollouts, and their tokens."""
        groups = batch.groups
        if "greedy_ids" in self._calls[batch.stage].needs:
            return len(groups), sum(group.extra_tokens for group in groups)
        infos = [group.info for group in groups if group.info is not None]
        return sum(len(info.lengths) for info in infos), sum(info.num_tokens for info in infos)

    def _finish(self, batch: Batch, lane: int) -> None:
        self._is_busy = False
        self._site.machine.occupy(-1)
        self._recorder.end(lane)
        self._room[batch.stage] += len(batch.groups)
        self._holding.end()
        self._granted()
        self._site.queue.commit(batch.stage, batch.groups)
        self._site.queue.wait(batch.stage, self)
