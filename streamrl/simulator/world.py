"""Everything that is there while a simulation's clock runs: replicas, trainers, control, queue.

Real: the loops that admit and train, `Control` with its admission, ledger, step assembly and
publishing, the schedule of micro-batches, and the arbiter of devices. What takes time is timed.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import cast

from streamrl.algorithms import ALGORITHMS, AlgorithmConfig
from streamrl.algorithms.adaptive_params import Dials
from streamrl.buffer import Admission, ExperienceQueue, Ledger, StepAssembler
from streamrl.buffer.admission.oversampling import MOST, Oversampling
from streamrl.dataflow import GENERATE, MOVED, POLICY, Kind
from streamrl.pipeline import admit, train
from streamrl.simulator.replicas.context import Site
from streamrl.simulator.replicas.cpu_model import Machine
from streamrl.simulator.replicas.device_leases import TRAINERS, Leases
from streamrl.simulator.replicas.failures import Crash, Failures, times_of
from streamrl.simulator.replicas.generators import Fleet, GeneratorReplica
from streamrl.simulator.replicas.prompts import Completions, Prompts
from streamrl.simulator.replicas.queue import StreamQueue
from streamrl.simulator.replicas.recorder import Recording
from streamrl.simulator.replicas.run_log import TimedBooks
from streamrl.simulator.replicas.scorers import ScorerReplica
from streamrl.simulator.replicas.trainers import MovedReference, TimedTrainer
from streamrl.simulator.replicas.weight_followers import Versions
from streamrl.simulator.results import process_names
from streamrl.simulator.scenario import Scenario, devices_of
from streamrl.stream.device_lease import FreeLease
from streamrl.stream.protocols import DeviceLease, Stage, StepOutcome
from streamrl.stream.run_state import Control
from streamrl.stream.weight_publisher import Publishing, Source
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import WeightManifest

Replica = GeneratorReplica | ScorerReplica


class World:
    """A run, and what becomes of it when something dies."""

    def __init__(self, scenario: Scenario) -> None:
        """Needs a running loop."""
        self.scenario = scenario
        self.outcomes: list[StepOutcome] = []
        self.step_ends: list[float] = []
        self.first_ends: list[float] = []
        self.crashes: list[Crash] = []
        dataflow, timings = scenario.dataflow, scenario.timings
        self.processes = process_names(dataflow, scenario.replicas)
        machine = Machine(timings.cores, crowding=timings.crowding)
        self.queue = StreamQueue(
            dataflow,
            machine,
            hop_s=timings.hop_s,
            books_s=timings.books_s,
            # Steps that are waited for as a whole have no places for what replaces the filtered.
            streamed=scenario.placement.streamed or scenario.workload.filtered > 0,
            groups_per_step=scenario.workload.groups_per_step,
        )
        self.site = Site(
            timings,
            machine,
            self.queue,
            Leases(dataflow, scenario.placement, slice_s=scenario.manner.slice_s),
            Completions(scenario.workload, scenario.seed),
            Recording(),
            scenario.reference,
            {},
        )
        self._books = TimedBooks(
            Ledger(), step_s=timings.step_s, keeps=scenario.failures is not None
        )
        self._prompts = Prompts()
        self._clock = asyncio.get_running_loop()
        self._checkpoint = 0
        self._replicas: dict[str, Replica] = {}
        self._devices = devices_of(scenario, self.processes)
        self._incarnations = count()
        self._session = 0
        self._training: asyncio.Task[None] | None = None
        self._end: asyncio.Future[None] = self._clock.create_future()

    async def run(self) -> None:
        """To the end of the last step."""
        self._begin()
        nodes = [asyncio.create_task(self._live(node)) for node in self._nodes()]
        try:
            await self._end
        finally:
            for task in (*nodes, self._training):
                if task is not None:
                    task.cancel()

    # What a run begins with, or begins again.

    def _begin(self) -> None:
        """Everybody starts at the last checkpoint."""
        version, scenario = self._checkpoint, self.scenario
        lease = self._lease(POLICY, TRAINERS)
        trainers = self._make_trainers()
        sources: dict[str, Source] = {**trainers}
        if any(call.follows == MOVED for call in scenario.dataflow.calls):
            sources[MOVED] = MovedReference(scenario.publish_s(MOVED))
        versions = {role: Versions() for role in sources}
        self.site.versions = versions
        # In one process, weights are where they are sampled from.
        lease_to_read = None if scenario.resides else lease
        publishing = Publishing(sources, versions, due=scenario.publishes, lease=lease_to_read)
        self._control = self._make_control(publishing, version)
        for one in versions.values():
            one.offer(WeightManifest(version, (), ()))
        role = GENERATE.role
        self._fleet = Fleet(role, self.site, holder=self._holder(role))
        for role, names in self.processes.items():
            if role not in trainers:
                for index in range(len(names)):
                    self._start(role, index)
        self._training = asyncio.create_task(self._train(trainers, lease))
        self._training.add_done_callback(self._trained)

    def _trained(self, training: "asyncio.Task[None]") -> None:
        """The run has ended, unless it was a trainer that died."""
        if not training.cancelled() and not self._end.done():
            error = training.exception()
            if error is None:
                self._end.set_result(None)
            else:
                self._end.set_exception(error)

    def _make_control(self, publishing: Publishing, version: int) -> Control:
        scenario = self.scenario
        config, per_step = scenario.pipeline, scenario.workload.groups_per_step
        factor = scenario.manner.oversample
        oversampling = Oversampling(factor, groups_per_step=per_step)
        most = MOST if factor is None else factor
        admission = Admission(
            self._books.ledger,
            depth=config.lead,
            groups_per_step=per_step,
            capacity_groups=math.ceil(most * (config.lead + 1) * per_step),
            total_groups=scenario.steps * per_step,
            version=version,
            oversampling=oversampling,
        )
        assembler = StepAssembler(
            max_staleness=config.max_staleness,
            groups_per_step=per_step,
            drops_stale=config.on_stale == "drop",
            oversampling=oversampling,
        )
        self._books.steps = {v: step for v, step in self._books.made.items() if v >= version}
        settings = AlgorithmConfig().settings(max_length=1, reward_weights={})
        dials = Dials(ALGORITHMS["grpo"], settings)
        return Control(admission, assembler, self._books, publishing, dials, self._prompts)

    def _make_trainers(self) -> dict[str, TimedTrainer]:
        scenario, site = self.scenario, self.site
        locks = self._locks()
        return {
            call.role: TimedTrainer(
                scenario.timings.train[call.role],
                scenario.pace,
                publish_s=scenario.publish_s(call.role),
                machine=site.machine,
                completions=site.completions,
                recorder=site.recording.of(call.role),
                devices=locks.get(call.role),
            )
            for call in scenario.dataflow.of_kind(Kind.TRAIN)
        }

    def _locks(self) -> Mapping[str, asyncio.Lock]:
        """Of trained models that have a device in common, unless they share its cores."""
        calls, placement = self.scenario.dataflow.of_kind(Kind.TRAIN), self.scenario.placement
        locks: dict[str, asyncio.Lock] = {}
        for i, call in enumerate(calls if not self.scenario.timings.cores else ()):
            mine = locks.setdefault(call.role, asyncio.Lock())
            for other in calls[:i]:
                if placement.overlaps(call.stage, other.stage):
                    theirs = locks[other.role]
                    locks = {role: mine if one is theirs else one for role, one in locks.items()}
        return locks

    def _lease(self, role: str, name: str) -> DeviceLease:
        return self.site.leases.of(role, self._holder(name)) or FreeLease()

    def _holder(self, name: str) -> str:
        """A name among those who share devices: who comes back is another one."""
        return f"{name}/{next(self._incarnations)}"

    def _start(self, role: str, index: int) -> None:
        calls, name = self.scenario.dataflow.roles[role], self.processes[role][index]
        replica: Replica
        if calls[0].kind is Kind.GENERATE:
            replica = GeneratorReplica(name, calls, self.site, self._fleet)
        else:
            replica = ScorerReplica(name, calls, self.site, holder=self._holder(name))
        self._replicas[name] = replica
        replica.start()

    async def _train(self, trainers: Mapping[str, TimedTrainer], lease: DeviceLease) -> None:
        control, queue = self._control, cast(ExperienceQueue, self.queue)
        stage = next(c.stage for c in self.scenario.dataflow.takers if c.kind is Kind.TRAIN)
        place = Stage(stage, queue, lease, SpanRecorder("train-loop", self._clock.time))
        await control.reconcile(queue)
        self.queue.offer_again()
        admitting = asyncio.create_task(admit(control, queue, wait_s=math.inf))
        try:
            config = self.scenario.pipeline
            await train(place, control, trainers, config, report=self._report)
        finally:
            admitting.cancel()

    async def _report(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)
        self.step_ends.append(self._clock.time())
        if len(self.step_ends) > len(self.first_ends):
            self.first_ends.append(self.step_ends[-1])
        failures, version = self.scenario.failures, outcome.version + 1
        due = failures is not None and version % failures.checkpoint_every == 0
        if due and not self._books.steps:
            self._checkpoint = version
            self._books.made.clear()

    # What dies.

    def _nodes(self) -> range:
        """The nodes that may die."""
        failures, calls = self.scenario.failures, self.scenario.placement.calls
        if failures is None:
            return range(0)
        size = max((one.mesh.devices.stop for one in calls.values()), default=0)
        return range(-(-size // failures.node_devices))

    async def _live(self, node: int) -> None:
        """A node dies now and then."""
        failures = self.scenario.failures
        assert failures is not None
        for seconds in times_of(node, failures, self.scenario.seed):
            await asyncio.sleep(seconds)
            devices = range(node * failures.node_devices, (node + 1) * failures.node_devices)
            dead = [name for name in self._replicas if _meet(self._devices[name], devices)]
            if any(_meet(self._devices[role], devices) for role in self.scenario.dataflow.trained):
                await self._restart(failures)
            elif dead:
                lost = sum(self._kill(name) for name in dead)
                self.crashes.append(Crash(self._clock.time(), tuple(dead), lost))
                self._clock.call_later(failures.restart_s, self._revive, dead, self._session)

    def _kill(self, name: str) -> int:
        return self._replicas.pop(name).die()

    def _revive(self, names: Sequence[str], session: int) -> None:
        """They come back, unless the whole run began again meanwhile."""
        if session == self._session:
            for name in names:
                role, _, index = name.rpartition("-")
                self._start(role, int(index))

    async def _restart(self, failures: Failures) -> None:
        """A trainer died: the run ends, and begins again from its last checkpoint."""
        if self._training is None or self._training.done():
            return
        self._session += 1
        self._training.cancel()
        names = tuple(self._replicas)
        lost = sum(self._kill(name) for name in names)
        again = len(self.outcomes) - self._checkpoint
        crash = Crash(self._clock.time(), names, lost, again, is_restart=True)
        self.crashes.append(crash)
        del self.outcomes[self._checkpoint :], self.step_ends[self._checkpoint :]
        await asyncio.sleep(failures.restart_s)
        self._begin()


def _meet(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
