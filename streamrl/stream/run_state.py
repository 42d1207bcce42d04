"""The coordinator's side of the stream: what may be admitted, what is in flight, what has ended."""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.buffer import AdmissionController, ExperienceQueue, RunLog, StepAssembler
from streamrl.buffer.admission.oversampling import OversamplingController
from streamrl.buffer.leases import OverdueLease
from streamrl.dataflow import FILTER_COLUMN
from streamrl.errors import ConfigError, DropLimitError, FilterLimitError
from streamrl.messages import Experience, GroupInfo, GroupOutcome, Prompt, parse_uid
from streamrl.stream.device_lease import ProgressClock
from streamrl.stream.protocols import FilterTally, PromptSource
from streamrl.stream.weight_publisher import WeightPublisher

STALE_CAUSE = "stale"
"""Cause of a drop: tokens beyond the bound."""
SURPLUS_CAUSE = "surplus"
"""Cause of a drop: the filter has kept more groups than there were places for within the bound."""
LATE_CAUSES = (STALE_CAUSE, SURPLUS_CAUSE)
"""Causes that no stage is to blame for."""
STOP_GRACE_S = 7.0
"""A run that is stopped has this long to end a step that is between two of its updates, s."""
ON_STALE = ("wait", "drop")
ON_STALL = ("abort", "redeliver", "warn")


@dataclass
class PipelineConfig:
    """How the stages are coupled.

    max_staleness: most versions a token may be behind the step that trains it; 0 is on-policy.
    depth: steps that generation may be ahead of training; null: max_staleness.
    on_stale: a step waits for the groups that could not be trained later, or takes what is ready
        and drops those that have become too old; the prompt of such a group is admitted anew.
    groups_per_step: groups in one optimizer step.
    micro_batch_tokens: most tokens, padding included, in one forward and backward of one rank.
    stall_s: work that takes longer, or a step that gets no group for this long, is a stall, s.
    on_stall: abort: a step that gets no group ends the run; redeliver: stalled work is handed out
        again; warn: it is only reported. A step that gets no group for twice
        queue.max_attempts times stall_s ends the run in any case.
    """

    max_staleness: int = 1
    depth: int | None = None
    on_stale: str = "wait"
    groups_per_step: int = 32
    micro_batch_tokens: int = 16384
    stall_s: float = 300.0
    on_stall: str = "abort"

    def __post_init__(self) -> None:
        for key in ("max_staleness", "max_steps_ahead"):
            if getattr(self, key) < 0:
                name = "depth" if key == "max_steps_ahead" else key
                raise ConfigError(f"pipeline.{name}={getattr(self, key)}: must be 0 or more")
        for key in ("groups_per_step", "micro_batch_tokens", "stall_s"):
            if vars(self)[key] <= 0:
                raise ConfigError(f"pipeline.{key}={vars(self)[key]}: must be above 0")
        for key, allowed in (("on_stale", ON_STALE), ("on_stall", ON_STALL)):
            if vars(self)[key] not in allowed:
                raise ConfigError(
                    f"pipeline.{key}={vars(self)[key]}: must be one of {', '.join(allowed)}"
                )
        if self.on_stale == "wait" and self.max_steps_ahead > self.max_staleness:
            raise ConfigError(
                f"pipeline.depth={self.depth}: ({self.depth} + 1) * {self.groups_per_step} groups"
                f" in flight, but only (pipeline.max_staleness {self.max_staleness} + 1) *"
                f" {self.groups_per_step} of them can be trained before they are too old;"
                " on_stale=drop would drop the others"
            )

    @property
    def max_steps_ahead(self) -> int:
        """Steps that generation may be ahead of training."""
        return self.max_staleness if self.depth is None else self.depth


@dataclass
class RunState:
    """The coordinator's books, shared by the admitting and the training loop.

    `prompts` is where replacements come from, `max_attempts` how often a prompt may be admitted,
    `should_readmit_failed` whether a failed group's prompt is among them. `max_filtered` ends a run
    whose data yields nothing: most groups filtered for one step; `max_dropped` one whose reward,
    say, fails for every group: most groups dropped for one step.
    """

    admission: AdmissionController
    assembler: StepAssembler
    run_log: RunLog
    publisher: WeightPublisher
    adaptive_params: AdaptiveParams
    prompt_source: PromptSource
    max_attempts: int = 3
    should_readmit_failed: bool = False
    max_filtered: float = float("inf")
    max_dropped: float = float("inf")
    on_group_finished: Callable[[str, GroupOutcome], None] = lambda uid, how: None
    """Told of every group that ends untrained."""
    on_stall: Callable[[Sequence[OverdueLease]], None] = lambda found: None
    """Told of work that takes too long."""
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    stop_deadline: float = -math.inf
    """Once the run is stopping, a step that is torn may go on until then, by the loop's clock."""
    is_step_abandoned: bool = False
    """The step under way was left as it is: nobody begins to update any more."""
    pending_inserts: set[str] = field(default_factory=set)
    """Uids that are booked and on their way into a shard."""
    run_log_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while prompts are booked: whoever has it sees ledger, log and prompts agree."""
    prompts_to_insert: list[Prompt] = field(default_factory=list)
    """Prompts that come again: booked, and put in by the admitting loop."""
    surplus_uids: list[str] = field(default_factory=list)
    """Uids of surplus groups: their prompts are the next to be admitted anew, once there is credit.
    """
    filter_tally: FilterTally = field(default_factory=FilterTally)
    """What was filtered since the last step."""
    drop_counts: Counter[str] = field(default_factory=Counter)
    """Groups that failed since the last step, by cause."""
    resumed_uids: frozenset[str] = frozenset()
    """Uids that were in flight when the books were taken over."""
    progress_clock: ProgressClock = field(default_factory=ProgressClock)
    """Beats where stages wait for each other's devices."""
    has_partial_update: bool = False
    """A step has begun to update: until it is booked the models are those of no version."""

    def request_stop(self) -> None:
        """End the run: at once, but for a step that is torn, which gets FINISH_S to its end."""
        self.stop_deadline = asyncio.get_running_loop().time() + STOP_GRACE_S
        self.stop_requested.set()

    def should_abandon_step(self, *, needs_s: float = 0.0) -> bool:
        """Whether the step under way is to be left as it is: by one trainer, then by all.

        `needs_s` is what it takes to end it, as far as that is known.
        """
        late = asyncio.get_running_loop().time() + needs_s >= self.stop_deadline
        self.is_step_abandoned |= self.stop_requested.is_set() and (
            late or not self.has_partial_update
        )
        return self.is_step_abandoned

    @property
    def oversampling(self) -> OversamplingController:
        """How many prompts are admitted for a place."""
        return self.admission.oversampling

    @property
    def inserted_uids(self) -> set[str]:
        """Uids that must be in a shard: all in flight but those on their way into one."""
        return set(self.admission.ledger.in_flight) - self.pending_inserts

    async def reconcile_queue(self, queue: ExperienceQueue) -> None:
        """Make the queue hold what is in flight by the books: they are the truth after a crash.

        A group whose admission or whose leaving did not get onto the books leaves. A prompt that
        did not get into its shard is put in by the admitting loop, as it may have to wait for room.
        """
        in_flight = self.admission.ledger.in_flight
        self.resumed_uids = frozenset(in_flight)
        for uid, version in in_flight.items():
            self.assembler.admit_group(uid, version)
        held = set((await queue.get_stats()).uids)
        await queue.remove_groups(sorted(held - in_flight.keys()), self.admission.version)
        # Not a difference of sets: which comes first must not depend on how strings are hashed.
        missing = sorted((uid for uid in in_flight if uid not in held), key=in_flight.__getitem__)
        self.pending_inserts.update(missing)
        self.prompts_to_insert += [self.prompt_source.get_prompt(uid) for uid in missing]

    async def admit_prompts(self, queue: ExperienceQueue) -> None:
        """Put in the prompts that come again, and as many new ones as there is credit for."""
        if self.oversampling.is_enabled:
            # To know of it never gives more credit: who is waiting for some need not ask.
            self.keep_groups(await queue.find_uids_with(FILTER_COLUMN))
        async with self.run_log_lock:
            credit = self.admission.num_credits
            again, self.surplus_uids = self.surplus_uids[:credit], self.surplus_uids[credit:]
            prompts = [self.prompt_source.retry_prompt(uid) for uid in again]
            await self.prompt_source.prefetch_prompts(credit - len(again))
            prompts += self.prompt_source.draw_prompts(credit - len(again))
            uids, version = [prompt.uid for prompt in prompts], self.admission.published_version
            self._expect_groups(uids, version)
            if uids:
                await self.run_log.record_admissions(uids, version)
            prompts, self.prompts_to_insert = [*self.prompts_to_insert, *prompts], []
        in_flight = self.admission.ledger.in_flight
        for version, batch in itertools.groupby(prompts, key=lambda prompt: in_flight[prompt.uid]):
            entering = list(batch)
            # Room comes with a step's end, whenever that is; who waits for groups has a deadline.
            entered = self.pending_inserts.difference_update
            await queue.admit_prompts(entering, version, wait_s=math.inf, on_entered=entered)

    def keep_groups(self, uids: Iterable[str]) -> None:
        """The filter has kept these groups: each that is in flight has a place for itself."""
        in_flight = self.admission.ledger.in_flight
        for uid in uids:
            if uid in in_flight and self.oversampling.mark_kept(uid):
                self.assembler.keep_group(uid)

    def offer_groups(self, ready: Sequence[Experience]) -> None:
        """Groups have all their columns."""
        self.keep_groups(experience.uid for experience in ready)
        self.assembler.offer_groups(ready)

    def reset_step_counts(self) -> FilterTally:
        """A step is made: count for the next one. Returns what was filtered for it."""
        filtered, self.filter_tally = self.filter_tally, FilterTally()
        filtered.oversample = self.oversampling.factor
        self.drop_counts.clear()
        return filtered

    def remove_late_groups(self, *, is_whole: bool = False) -> dict[str, GroupOutcome]:
        """The groups that the step of this version and those after it cannot train any more.

        With `is_whole` that step has all it needs in what is ready. A group that is on its way into
        its shard is not among them: it cannot leave before it is there. Where each that was
        admitted has a place there can be none: one would be a bug, and is left to be found as such.
        """
        drops_stale = self.assembler.should_drop_stale
        if not (drops_stale or self.oversampling.is_enabled or self.resumed_uids):
            return {}
        if drops_stale:
            how = GroupOutcome(STALE_CAUSE, "tokens beyond pipeline.max_staleness")
        else:
            how = GroupOutcome(
                SURPLUS_CAUSE, "no place within pipeline.max_staleness (filter.oversample)"
            )
        late = self.assembler.remove_late_groups(
            self.admission.version,
            absent=self.pending_inserts,
            is_full=is_whole and not drops_stale,
        )
        return dict.fromkeys(late, how)

    async def finish_groups(
        self,
        queue: ExperienceQueue,
        ended: Mapping[str, GroupOutcome],
        infos: Mapping[str, GroupInfo | None] | None = None,
    ) -> None:
        """Book groups that end untrained, by cause, and let others take their places.

        `infos` is what is known of them.
        """
        # Nobody else books in between: the log would be ahead of the ledger.
        async with self.run_log_lock:
            comes = [uid for uid, how in ended.items() if self._should_readmit(uid, how)]
            # Others may have their places: they wait for a credit, as if they were new.
            self.surplus_uids += [uid for uid in comes if ended[uid].cause == SURPLUS_CAUSE]
            again = [uid for uid in comes if ended[uid].cause != SURPLUS_CAUSE]
            prompts = [self.prompt_source.retry_prompt(uid) for uid in again]
            uids, version = [prompt.uid for prompt in prompts], self.admission.published_version
            await self.run_log.record_finished(ended, readmitted=uids, version=version)
            for uid, how in ended.items():
                self.assembler.drop_group(uid)
                self.on_group_finished(uid, how)
                if how.filtered:
                    self.oversampling.count_filtered()
                    self.filter_tally.add_group((infos or {}).get(uid))
            self.oversampling.remove_groups(ended)
            self._expect_groups(uids, version)
            # Not put in from here: whoever trains must not wait for room that training makes.
            self.prompts_to_insert += prompts
        self.drop_counts.update(
            how.cause for uid, how in ended.items() if self._is_stage_failure(uid, how)
        )
        await queue.remove_groups(list(ended), self.admission.version)
        self.admission.refund_credit()

    def _should_readmit(self, uid: str, how: GroupOutcome) -> bool:
        """Whether the prompt of a group that ended so is admitted anew: as often as it may be."""
        attempts = parse_uid(uid)[2] + 1
        wanted = self.should_readmit_failed or how.cause in LATE_CAUSES
        return wanted and not how.filtered and attempts < self.max_attempts

    def check_step_limits(self, ended: Mapping[str, GroupOutcome]) -> None:
        """Raise FilterError or DropError if the step has filtered or dropped more than it may.

        `ended` are the last groups that did: of them are the reasons.
        """
        self._check_filter_limit(ended.values())
        self._check_drop_limit(
            [how for uid, how in ended.items() if self._is_stage_failure(uid, how)]
        )

    def _check_filter_limit(self, ended: Iterable[GroupOutcome]) -> None:
        count = self.filter_tally.num_groups
        if count > self.max_filtered:
            reasons = sorted({how.reason for how in ended if how.filtered})
            raise FilterLimitError(
                f"step {self.admission.version} has filtered {count} groups, more than"
                f" {self.max_filtered:.0f} (filter.max_filter_rounds): {'; '.join(reasons[:3])}"
            )

    def _is_stage_failure(self, uid: str, how: GroupOutcome) -> bool:
        """Whether a stage of this process's time failed at the group.

        A late one comes of the steps that are made, so that one step has only so many of them.
        One that was inherited may have failed before what was wrong was mended.
        """
        return not how.filtered and how.cause not in LATE_CAUSES and uid not in self.resumed_uids

    def _check_drop_limit(self, failed: Sequence[GroupOutcome]) -> None:
        if failed and self.drop_counts.total() > self.max_dropped:
            cause, count = self.drop_counts.most_common(1)[0]
            raise DropLimitError(
                f"step {self.admission.version} has dropped {self.drop_counts.total()} groups, more"
                f" than {self.max_dropped:.0f} (queue.max_drop_rounds), {count} of them as {cause};"
                f" the last: {failed[-1].reason}"
            )

    def _expect_groups(self, uids: Sequence[str], version: int) -> None:
        for uid in uids:
            self.assembler.admit_group(uid, version)
        self.pending_inserts.update(uids)
