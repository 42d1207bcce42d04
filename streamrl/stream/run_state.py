"""State of a run in the coordinator: staleness credits, groups in flight, stop requests."""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.buffer import AdmissionController, ExperienceQueue, RunLog, StepAssembler
from streamrl.buffer.shard import OverdueLease
from streamrl.buffer.staleness_credits import OversamplingController
from streamrl.data.pass_rates import PassRates
from streamrl.data.replays import ReplayStore
from streamrl.dataflow import FILTER_COLUMN
from streamrl.errors import ConfigError, DropLimitError, FilterLimitError, ServiceOutageError
from streamrl.files.typed_settings import FIXED_ON_RESUME, above, at_least, one_of
from streamrl.messages import (
    Experience,
    GroupInfo,
    GroupOutcome,
    Prompt,
    find_replayed_uid,
    make_retry_uid,
    parse_uid,
)
from streamrl.stream.device_lease import ProgressClock
from streamrl.stream.protocols import FilterTally, PromptSource
from streamrl.stream.weight_publisher import WeightPublisher
from streamrl.user_code.service_gate import Outage, list_outages

STALE_CAUSE = "stale"
"""Cause of a drop: tokens beyond the staleness bound."""
SURPLUS_CAUSE = "surplus"
"""Cause of a drop: oversampling kept more groups than the steps within the bound can train."""
LATE_CAUSES = (STALE_CAUSE, SURPLUS_CAUSE)
"""Causes that are not failures of a stage."""
STOP_GRACE_S = 7.0
"""Grace period of a stopping run to finish a step that is between two of its updates, s."""


@dataclass
class PipelineConfig:
    """Coupling of the stages: how far generation runs ahead, and when a wait is a stall.

    max_staleness: largest lag of a token's version behind the step that trains it; 0 is on-policy.
    depth: steps that generation may be ahead of training; null: max_staleness.
    on_stale: wait: a step waits for groups that no later step could train; drop: a step takes
        what is ready, drops groups that became too old, and readmits their prompts.
    groups_per_step: groups in one training step.
    micro_batch_tokens: most tokens, with padding, in one forward and backward pass of a rank.
    stall_s: time without progress, such as a new token of a group, after which work, or a step's
        wait for a group, counts as a stall, s.
    on_stall: abort: a step that gets no group, while no rollout grows, ends the run; redeliver:
        stalled work is handed out again; warn: stalls are only reported. With both,
        2 * queue.max_attempts * stall_s end the run.
    """

    outage_s: ClassVar[float] = 1800.0
    """Longest outage of a service outside the run, such as a judge's endpoint or a tool server, s.

    Stages wait for it, and nothing is dropped. Then the run ends, resumable.
    """
    max_staleness: Annotated[int, at_least(0)] = 1
    depth: Annotated[int | None, at_least(0)] = None
    on_stale: Annotated[str, one_of("wait", "drop")] = "wait"
    groups_per_step: Annotated[int, at_least(1), FIXED_ON_RESUME] = 32
    micro_batch_tokens: Annotated[int, at_least(1)] = 16384
    stall_s: Annotated[float, above(0)] = 300.0
    on_stall: Annotated[str, one_of("abort", "redeliver", "warn")] = "abort"

    def __post_init__(self) -> None:
        if self.on_stale == "wait" and self.max_steps_ahead > self.max_staleness:
            raise ConfigError(
                f"pipeline.depth={self.depth}: ({self.depth} + 1) * {self.groups_per_step} groups"
                f" in flight, but only (pipeline.max_staleness {self.max_staleness} + 1) *"
                f" {self.groups_per_step} of them can be trained before they are too old;"
                " on_stale=drop would drop the others"
            )

    @property
    def max_steps_ahead(self) -> int:
        return self.max_staleness if self.depth is None else self.depth


async def describe_no_waits() -> str:
    """Describe the waits of a run without episodes."""
    return ""


@dataclass
class RunState:
    """State that the admission loop and the training loop share.

    `max_attempts`: most admissions per prompt.
    `should_readmit_failed`: readmit the prompt of a group that a stage failed; those of late groups
      are readmitted in any case.
    `max_filtered`: most filtered groups per step; beyond it the run ends, because the data yields
    no training signal.
    `max_dropped`: most groups per step dropped because a stage failed; beyond it the run ends,
    because, say, the reward fails for every group.
    """

    admission: AdmissionController
    assembler: StepAssembler
    run_log: RunLog
    publisher: WeightPublisher
    adaptive_params: AdaptiveParams
    prompt_source: PromptSource
    pass_rates: PassRates | None = None
    """Pass rates by which `prompt_source` draws; None if it draws every row."""
    replays: ReplayStore | None = None
    """Trained groups that may be admitted again; None without replay."""
    max_attempts: int = 3
    should_readmit_failed: bool = False
    max_filtered: float = float("inf")
    max_dropped: float = float("inf")
    on_group_finished: Callable[[str, GroupOutcome], None] = lambda uid, outcome: None
    """Called for every group that ends untrained."""
    on_stall: Callable[[Sequence[OverdueLease], str], None] = lambda overdue, waits: None
    """Called with leases that have become overdue since the last check, and `describe_waits`."""
    describe_waits: Callable[[], Awaitable[str]] = describe_no_waits
    """Returns what open episodes wait for, for the report of a stall; "" if for nothing."""
    find_outages: Callable[[], Awaitable[Sequence[Outage]]] = list_outages
    """Returns the outages of services that stages wait for."""
    on_outages: Callable[[Sequence[Outage]], None] = lambda outages: None
    """Called every now and then with all outages."""
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    stop_deadline: float = -math.inf
    """Time (of the event loop) until which a stopping run may finish a half-updated step."""
    is_step_abandoned: bool = False
    """True if the current training step is abandoned: no trainer starts a further update."""
    pending_inserts: set[str] = field(default_factory=set)
    """Uids that are in the run log and on the way into a shard."""
    run_log_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while prompts are logged; its holder sees ledger, log and assembler agree."""
    prompts_to_insert: list[Prompt] = field(default_factory=list)
    """Readmitted prompts: logged already, inserted by the admission loop."""
    surplus_uids: list[str] = field(default_factory=list)
    """Uids of surplus groups; their prompts are readmitted first once credits are available."""
    filter_tally: FilterTally = field(default_factory=FilterTally)
    """Groups filtered or dropped as stale since the last step."""
    drop_counts: Counter[str] = field(default_factory=Counter)
    """Failed groups since the last step, by cause."""
    resumed_uids: frozenset[str] = frozenset()
    """Uids that were in flight when this process took over the run."""
    progress_clock: ProgressClock = field(default_factory=ProgressClock)
    """Records progress on shared devices."""
    has_partial_update: bool = False
    """True between a step's first update and its run log entry: the models match no version."""

    def request_stop(self) -> None:
        """Make the loops stop; a step with some of its updates made gets STOP_GRACE_S to finish."""
        self.stop_deadline = asyncio.get_running_loop().time() + STOP_GRACE_S
        self.stop_requested.set()

    def should_abandon_step(self, *, needs_s: float = 0.0) -> bool:
        """Return True if a stopping run must abandon the current training step.

        Once True, the result stays True for all trainers of the step. needs_s: estimated time to
        finish the step, s.
        """
        is_late = asyncio.get_running_loop().time() + needs_s >= self.stop_deadline
        self.is_step_abandoned |= self.stop_requested.is_set() and (
            is_late or not self.has_partial_update
        )
        return self.is_step_abandoned

    async def begin_update(self, role: str, *, finishes_step: bool) -> bool:
        """Wait until the model of a role may change, and record that it does.

        Returns False if the step is abandoned. finishes_step: the update is the last of the step.
        """
        # Parameters must not change during publishing; an EMA reference reads the policy's
        # parameters, too.
        await self.publisher.wait_until_published()
        # The last update finishes the step. Every earlier update obliges the run to finish the
        # step, so check before updating.
        if self.is_step_abandoned or (not finishes_step and self.should_abandon_step()):
            return False
        self.publisher.mark_changed(role)
        self.has_partial_update = True
        return True

    @property
    def oversampling(self) -> OversamplingController:
        return self.admission.oversampling

    @property
    def inserted_uids(self) -> set[str]:
        """Uids that must be in a shard: all in flight except `pending_inserts`."""
        return set(self.admission.ledger.in_flight) - self.pending_inserts

    async def reconcile_queue(self, queue: ExperienceQueue) -> None:
        """Make the queue hold exactly the groups that the run log has in flight, after a crash.

        Removes other groups: their admission was not logged, or their end was. The admission loop
        later inserts prompts that did not reach a shard, because inserting may wait for capacity.
        """
        in_flight = self.admission.ledger.in_flight
        self.resumed_uids = frozenset(in_flight)
        for uid, version in in_flight.items():
            self.assembler.admit_group(uid, version)
        queued = set((await queue.get_stats()).uids)
        # No set difference: the order must not depend on string hashing.
        missing = sorted((uid for uid in in_flight if uid not in queued), key=in_flight.__getitem__)
        self.pending_inserts.update(missing)
        ended, version = sorted(queued - in_flight.keys()), self.admission.version
        await queue.end_step(ended, version, self.list_kept_uids())
        self.prompts_to_insert += [self.prompt_source.get_prompt(uid) for uid in missing]

    async def fill_queue(self, queue: ExperienceQueue) -> None:
        """Insert waiting readmitted prompts into the queue, and new prompts for free credits."""
        if self.oversampling.is_enabled:
            # Kept groups only reduce the credits, so a waiting admission loop can skip this.
            self.keep_groups(await queue.find_uids_with(FILTER_COLUMN))
        async with self.run_log_lock:
            credit = self.admission.num_credits
            readmitted, self.surplus_uids = self.surplus_uids[:credit], self.surplus_uids[credit:]
            prompts = [self.prompt_source.get_prompt(make_retry_uid(uid)) for uid in readmitted]
            version, num_drawn = self.admission.announced_version, credit - len(readmitted)
            if num_drawn and self.pass_rates is not None:
                self.pass_rates.advance_version(version)
            # In the order of their numbers, however many credits come at once.
            first = self.admission.ledger.counts.admitted + len(prompts)
            replayed = self._draw_replays(version, range(first, first + num_drawn))
            # From now on the queue must keep what they replay.
            self.pending_inserts.update(filter(None, replayed))
            await self.prompt_source.prefetch_prompts(num_drawn := replayed.count(None))
            drawn = iter(self.prompt_source.draw_prompts(num_drawn))
            get_prompt = self.prompt_source.get_prompt
            prompts += [next(drawn) if uid is None else get_prompt(uid) for uid in replayed]
            uids = [prompt.uid for prompt in prompts]
            self._expect_groups(uids, version)
            if uids:
                await self.run_log.record_admissions(uids, version)
            prompts, self.prompts_to_insert = [*self.prompts_to_insert, *prompts], []
        in_flight = self.admission.ledger.in_flight
        for version, batch in itertools.groupby(prompts, key=lambda prompt: in_flight[prompt.uid]):
            inserting = list(batch)
            # Infinite wait: capacity frees up when a step ends. The training loop has the deadline.
            on_entered = self.pending_inserts.difference_update
            await queue.insert_prompts(inserting, version, wait_s=math.inf, on_entered=on_entered)

    def _draw_replays(self, version: int, slots: range) -> list[str | None]:
        """Return the replay that each admission is at `version`, by number; None: a new prompt."""
        if self.replays is None:
            return [None] * len(slots)
        busy, drawn = {*map(find_replayed_uid, self.admission.ledger.in_flight)}, list[str | None]()
        for slot in slots:
            drawn.append(uid := self.replays.draw_uid(version, slot, busy))
            busy.add(uid and find_replayed_uid(uid))
        return drawn

    def list_kept_uids(self) -> list[str] | None:
        """Return the groups that the queue must keep for replays; None without replay."""
        return None if self.replays is None else self.replays.list_kept(self.pending_inserts)

    def keep_groups(self, uids: Iterable[str]) -> None:
        """Record that the group filter kept groups; ignore groups that are not in flight."""
        in_flight = self.admission.ledger.in_flight
        for uid in uids:
            if uid in in_flight and self.oversampling.mark_kept(uid):
                self.assembler.keep_group(uid)

    def offer_groups(self, ready: Sequence[Experience]) -> None:
        """Pass groups that are ready for training to the step assembler."""
        self.keep_groups(experience.uid for experience in ready)
        self.assembler.offer_groups(ready)

    def reset_step_counts(self) -> FilterTally:
        """Reset the counts of filtered and dropped groups after a step; return the filter tally."""
        filtered, self.filter_tally = self.filter_tally, FilterTally()
        filtered.oversample = self.oversampling.factor
        self.drop_counts.clear()
        return filtered

    def remove_late_groups(self, *, is_full: bool = False) -> dict[str, GroupOutcome]:
        """Return the late groups, which neither the current nor a later training step can train.

        is_full: the ready groups fill the current step, so that only later steps count.

        Removes late groups that are ready from the assembler. Excludes `pending_inserts`, which
        must reach a shard before they can be removed. Returns {} if credits guarantee a slot for
        every admitted group; a late group is then a bug, and left for StaleGroupError.
        """
        drops_stale = self.assembler.should_drop_stale
        if not (drops_stale or self.oversampling.is_enabled or self.resumed_uids):
            return {}
        if drops_stale:
            outcome = GroupOutcome(STALE_CAUSE, "tokens beyond pipeline.max_staleness")
        else:
            outcome = GroupOutcome(
                SURPLUS_CAUSE, "no slot within pipeline.max_staleness (filter.oversample)"
            )
        late = self.assembler.remove_late_groups(
            self.admission.version, absent=self.pending_inserts, is_full=is_full and not drops_stale
        )
        return dict.fromkeys(late, outcome)

    async def finish_groups(
        self,
        queue: ExperienceQueue,
        ended: Mapping[str, GroupOutcome],
        infos: Mapping[str, GroupInfo | None] | None = None,
    ) -> None:
        """End groups untrained: log them, readmit prompts if due, refund the credits.

        ended: outcome of each group, by uid. infos: sizes of the groups, None where not generated.
        """
        # The lock covers logging and applying: log and ledger must agree for its next holder.
        async with self.run_log_lock:
            retried = [uid for uid, outcome in ended.items() if self._should_readmit(uid, outcome)]
            # Newer groups may take the slots of surplus groups, so these wait for new credits.
            self.surplus_uids += [uid for uid in retried if ended[uid].cause == SURPLUS_CAUSE]
            readmitted = [uid for uid in retried if ended[uid].cause != SURPLUS_CAUSE]
            prompts = [self.prompt_source.get_prompt(make_retry_uid(uid)) for uid in readmitted]
            uids, version = [prompt.uid for prompt in prompts], self.admission.announced_version
            await self.run_log.record_finished(ended, readmitted=uids, version=version)
            if self.pass_rates is not None:
                rates = {uid: outcome.pass_rate for uid, outcome in ended.items()}
                self.pass_rates.record_results(version, rates)
            for uid, outcome in ended.items():
                self.assembler.drop_group(uid)
                self.on_group_finished(uid, outcome)
                if outcome.filtered:
                    self.oversampling.count_filtered()
                    self.filter_tally.add_group((infos or {}).get(uid))
                elif outcome.cause == STALE_CAUSE:
                    info, is_lost = self.assembler.late_infos.get(uid), uid not in retried
                    self.filter_tally.add_stale_group(info, is_lost=is_lost)
            self.oversampling.remove_groups(ended)
            self._expect_groups(uids, version)
            # Inserted by the admission loop: the training loop must not wait for capacity that
            # only training frees.
            self.prompts_to_insert += prompts
        self.drop_counts.update(
            outcome.cause for uid, outcome in ended.items() if self._is_stage_failure(uid, outcome)
        )
        await queue.remove_groups(list(ended), self.admission.version)
        self.admission.refund_credit()

    def _should_readmit(self, uid: str, outcome: GroupOutcome) -> bool:
        """Return True if the prompt of a group that ended untrained is to be admitted again."""
        attempts = parse_uid(uid)[2] + 1
        is_due = self.should_readmit_failed or outcome.cause in LATE_CAUSES
        # The attempt of a replay is beyond all limits.
        return is_due and not outcome.filtered and attempts < self.max_attempts

    def check_step_limits(self, ended: Mapping[str, GroupOutcome]) -> None:
        """Raise FilterLimitError or DropLimitError if the step filtered or dropped too many groups.

        ended: outcomes of the latest groups; the message quotes their reasons.
        """
        count = self.filter_tally.num_groups
        if count > self.max_filtered:
            reasons = sorted({outcome.reason for outcome in ended.values() if outcome.filtered})
            raise FilterLimitError(
                f"step {self.admission.version + 1} has filtered {count} groups, more than"
                f" {self.max_filtered:.0f} (filter.max_filter_rounds): {'; '.join(reasons[:3])}"
            )
        failed = [how for uid, how in ended.items() if self._is_stage_failure(uid, how)]
        if failed and self.drop_counts.total() > self.max_dropped:
            cause, count = self.drop_counts.most_common(1)[0]
            raise DropLimitError(
                f"step {self.admission.version} has dropped {self.drop_counts.total()} groups, more"
                f" than {self.max_dropped:.0f}, {count} of them as {cause};"
                f" the last: {failed[-1].reason}"
            )

    def _is_stage_failure(self, uid: str, outcome: GroupOutcome) -> bool:
        """Return True if a group was dropped because a stage failed, since this process started.

        Late groups do not count; the number of steps bounds their number. Resumed groups do not
        count either: the failure may predate the user's fix.
        """
        return (
            not outcome.filtered
            and outcome.cause not in LATE_CAUSES
            and uid not in self.resumed_uids
        )

    async def observe_outages(self, limit_s: float) -> None:
        """Report the outages of services; meanwhile, or while weights move, no wait is a stall.

        Raises ServiceOutageError for an outage of more than `limit_s`.
        """
        outages = await self.find_outages()
        self.on_outages(outages)
        if self.publisher.is_moving_weights:
            self.progress_clock.record_progress()
        for outage in outages:
            self.progress_clock.record_progress()
            if outage.down_s > limit_s:
                raise ServiceOutageError(
                    f"{outage.reason}: {outage.stage} has waited for {outage.down_s:.0f} s, more"
                    f" than {limit_s:g} s; a resumed run continues the"
                    f" {len(self.admission.ledger.in_flight)} groups in flight"
                )

    def _expect_groups(self, uids: Sequence[str], version: int) -> None:
        """Announce newly admitted groups to the assembler and mark them as not yet inserted."""
        for uid in uids:
            self.assembler.admit_group(uid, version)
        self.pending_inserts.update(uids)
