"""A generator replica: takes prompts, samples their groups together, follows the policy."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl.dataflow import GREEDY, Call
from streamrl.messages import GroupInfo
from streamrl.placement.stage_timings import WeightsTiming
from streamrl.simulator.replicas.context import Site
from streamrl.simulator.replicas.cpu_model import Timer
from streamrl.simulator.replicas.device_hold import Holding
from streamrl.simulator.replicas.engine import Engine, Sampling
from streamrl.simulator.replicas.queue import Group
from streamrl.simulator.replicas.weight_followers import Following
from streamrl.stream.device_lease import FreeLease
from streamrl.stream.stage_worker import shared_places
from streamrl.telemetry.spans import ArgValue


@dataclass(eq=False, slots=True)
class GroupWork:
    """A group that is sampled for a stage, and the lane of its span once it is."""

    group: Group
    stage: str
    lane: int = -1


class GeneratorReplica:
    """Serves all stages that generate, each while it has a free place.

    A group begins once the version it was admitted at is held, and the replica has its devices.
    """

    def __init__(self, process: str, calls: Sequence[Call], site: Site, fleet: "Fleet") -> None:
        """`fleet` are all of its role."""
        self.process = process
        self._site = site
        self._recorder = site.recording.of(process)
        timing = site.timings.generator
        self._begin_s = timing.begin_s
        stages, group_size = [call.stage for call in calls], site.completions.group_size
        self._places = shared_places(timing.max_running, stages, group_size=group_size)
        self._engine: Engine[GroupWork] = Engine(timing, list(self._places.values()))
        self._fleet, lease = fleet, fleet.lease
        self._holding = Holding(calls[0].stage, lease, self._granted)
        self._following = Following(
            self,
            site.timings.weights.get(calls[0].stage, WeightsTiming()),
            site.versions[calls[0].follows],
            lease or FreeLease(),
            self._recorder,
        )
        self._early: list[GroupWork] = []
        self._begun: list[GroupWork] = []
        self._timer: Timer | None = None
        self._rings_at = math.inf
        self._is_busy = self._is_dead = False

    def start(self) -> None:
        """Take groups once there is a version to sample them from."""
        self._fleet.replicas.append(self)
        self._following.start()

    def die(self) -> int:
        """What it was at is lost, and handed out again; returns the tokens that were sampled."""
        self._engine.halt(self._site.machine.now)
        lost = self._engine.sampled()
        self._is_dead = True
        self._fleet.replicas.remove(self)
        self._holding.close()
        self._following.close()
        self._engine = Engine(self._site.timings.generator)
        self._update()
        self._recorder.close()
        self._site.queue.release(self)
        return lost

    # What the queue asks for.

    def room(self, stage: str) -> int:
        """How many groups more it may be given."""
        return 0 if self._is_dead else self._places[stage].room

    def give(self, stage: str, groups: Sequence[Group]) -> None:
        """It has these from now on."""
        places = self._places[stage]
        self._engine.take(places, len(groups) * places.per_group)
        self._update()
        works = [GroupWork(group, stage) for group in groups]
        if self._begin_s:
            asyncio.get_running_loop().call_later(self._begin_s, self._enter, works)
        else:
            self._enter(works)

    def _enter(self, works: Sequence[GroupWork]) -> None:
        held = self._following.held
        self._early += [work for work in works if work.group.admitted_version > held]
        ready = [work for work in works if work.group.admitted_version <= held]
        if ready and not self._is_dead:
            self._begun += ready
            self._holding.begin(len(ready))

    def _granted(self) -> None:
        """It has its devices: whatever is begun is sampled."""
        completions, now = self._site.completions, self._site.machine.now
        begun, self._begun = self._begun, []
        for work in begun:
            uid = work.group.uid
            greedy = work.stage == GREEDY.stage
            lengths = [completions.greedy(uid)] if greedy else completions.of(uid)
            told = " ".join(map(str, lengths))
            tokens = completions.prompt_tokens
            facts: dict[str, ArgValue] = {"uid": uid, "prompt": tokens, "lengths": told}
            work.lane = self._recorder.begin(work.stage, facts)
            self._engine.add(work, tokens, lengths, now, self._places[work.stage])
        self._update()

    # What the weights ask for.

    async def load(self, version: int, pause_s: float) -> None:
        """Sample from this version from the next step on."""
        machine = self._site.machine
        until = self._engine.load(version, pause_s, machine.now)
        self._update()
        await machine.until(until)

    def arrived(self) -> None:
        """A version is held: what was admitted at it can begin."""
        early, self._early = self._early, []
        self._enter(early)
        self._ask()

    # What those ask for who share its devices.

    def halt(self) -> float:
        """Sample nothing from the end of this step on, which is returned."""
        until = self._engine.halt(self._site.machine.now)
        self._update()
        return until

    def rest(self) -> None:
        """The step has ended: it does nothing."""
        self._recorder.rest(self._places)

    def go_on(self) -> None:
        """Sample again."""
        self._engine.go_on(self._site.machine.now)
        self._recorder.go_on()
        self._update()

    # How it goes on.

    def _update(self) -> None:
        """Ring when something is to happen next."""
        machine, engine = self._site.machine, self._engine
        at = engine.next_s
        if at != self._rings_at:
            if self._timer is not None:
                self._timer.cancel()
            self._rings_at = at
            self._timer = machine.call_at(at, self._ring) if at < math.inf else None
        if engine.is_busy != self._is_busy:
            self._is_busy = engine.is_busy
            machine.occupy(1 if self._is_busy else -1)

    def _ring(self) -> None:
        # Not the machine's time, which may be less by a rounding error.
        at, self._rings_at = self._rings_at, math.inf
        done = self._engine.advance(at)
        self._update()
        self._finish(done)

    def _finish(self, done: Sequence[Sampling[GroupWork]]) -> None:
        finished: dict[str, list[Group]] = {}
        for sampling in done:
            work = sampling.key
            self._recorder.end(work.lane)
            self._tell(work, sampling.versions)
            self._holding.end()
            finished.setdefault(work.stage, []).append(work.group)
        for stage, groups in finished.items():
            self._site.queue.commit(stage, groups)
        self._ask()

    def _ask(self) -> None:
        """For groups of each stage that has places."""
        for stage, places in self._places.items():
            if places.free > 0:
                self._site.queue.wait(stage, self)

    def _tell(self, work: GroupWork, versions: Mapping[int, int]) -> None:
        """What is known of a group from now on."""
        completions, group = self._site.completions, work.group
        prompt_tokens = completions.prompt_tokens
        if work.stage == GREEDY.stage:
            group.extra_tokens = prompt_tokens + completions.greedy(group.uid)
        else:
            lengths = completions.of(group.uid)
            whole = tuple([prompt_tokens + tokens for tokens in lengths])
            group.is_filtered = completions.is_filtered(group.uid)
            group.info = GroupInfo(whole, sum(lengths), tuple(sorted(versions.items())))


class Fleet:
    """All generators that are there. They have their devices together, and give way together."""

    def __init__(self, role: str, site: Site, *, holder: str) -> None:
        """`holder` is their name among those who share devices, unlike any before."""
        self.replicas: list[GeneratorReplica] = []
        self.lease = site.leases.of(role, holder, suspendable=self)
        self._machine = site.machine

    async def suspend(self) -> None:
        """All stand still, each from the end of its step on."""
        await self._machine.until(max((one.halt() for one in self.replicas), default=0.0))
        for one in self.replicas:
            one.rest()

    async def resume(self) -> None:
        """All go on."""
        for one in self.replicas:
            one.go_on()
