"""The stream: what each stage waits for, does and produces. Read this first.

    admit ---> generate ---> score (reward, reference, value, ...) ---> train (policy, critic)
      ^           ^                                    ^                   |        |
      |           +---- follow_weights <-- publish ----|-------------------+        |
      | credits                                        +--- follow_weights <-- publish
      +---------------------------- version + 1 ---------------------------+

Every arrow is the experience queue: a stage takes a group once the columns it needs are there,
computes, and puts its own columns. Micro-batch k+1 is generated while k is scored and trained.
How far generation may run ahead is a matter of credits alone (`max_staleness`), and whether two
stages may compute at the same time is a matter of the device lease alone; no loop asks which mode
it is in. Nothing here knows an actor, an engine or an algorithm: actors host these loops, tests run
the same ones in one process on a virtual clock.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.buffer import ExperienceQueue
from streamrl.errors import VersionSupersededError, WeightsError
from streamrl.messages import Columns, Experience
from streamrl.stream.protocols import (
    FollowerProtocol,
    ReadPartialRollouts,
    SampleFunction,
    StageContext,
    StepResult,
    TrainerProtocol,
    WeightChannel,
)
from streamrl.stream.run_state import PipelineConfig, RunState
from streamrl.stream.stage_worker import (
    POLL_WAIT_S,
    ComputeFunction,
    ConcurrencyLimit,
    InFlightWork,
    PartialRolloutSaver,
    StageResult,
    serve_stage,
)
from streamrl.stream.train_step import train_step
from streamrl.weights import LoadVerification, ServedVersion, WeightManifest
from streamrl.weights.metrics import PullStats
from streamrl.weights.version_registry import ReaderState, WeightFault

PULL_ATTEMPTS = 5
"""So many times in a row a follower tries to take up a version before it is replaced."""
RETRY_S = 0.25
"""Half of the time before the second try, which is doubled for each one after it, s."""
SUPERSEDED_RETRY_S = 0.01
"""Time to the first look for a version that is on its way, likewise, s; never more than RETRY_S."""


@dataclass(frozen=True)
class ScoringLimits:
    """What a scorer takes: groups with these columns, at most `most` of them, `batch` at once."""

    columns: Sequence[str]
    max_groups: int
    batch_size: int


# The loops, in the order in which data flows.


async def admit_prompts(
    control: RunState, queue: ExperienceQueue, *, wait_s: float = POLL_WAIT_S
) -> None:
    """Waits for: credits. Produces: prompts in the queue, with the version they are admitted at."""
    while not control.stop_requested.is_set():
        if (
            control.prompts_to_insert
            or await control.admission.wait_for_credit(wait_s)
            or control.prompts_to_insert
        ):
            await control.admit_prompts(queue)


async def generate_rollouts(
    stage: StageContext,
    sample: SampleFunction,
    held: ServedVersion,
    *,
    places: ConcurrencyLimit,
    begun: ReadPartialRollouts,
) -> None:
    """Waits for: a prompt, a free place, the version the prompt was admitted at.

    Produces: what is sampled for it, such as the rollouts of its group; meanwhile, for who may have
    to go on with it, what is `begun` of it.
    """
    notes = PartialRolloutSaver(stage.queue, exclude_unverified(begun, held))
    desk = InFlightWork(places)

    async def compute(experiences: Sequence[Experience]) -> Sequence[StageResult]:
        (experience,) = experiences
        assert experience.prompt is not None
        await held.wait_for_version(experience.admitted_version)
        prompt_tokens = len(experience.prompt.token_ids)
        async with stage.record_compute(uid=experience.uid, prompt=prompt_tokens) as known:
            with notes.track_lease(experience.lease):
                columns = await sample(
                    experience.prompt, experience.partial_rollouts, desk.make_slot_releaser()
                )
            known["lengths"] = " ".join(map(str, count_sampled_tokens(columns)))
        # Nothing leaves that was sampled by a version which is not verified yet.
        await held.wait_for_version(find_newest_version(columns))
        return [columns]

    if await wait_for_first_version(stage, held):
        await serve_stage(stage, compute, desk, columns=(), batch=1, notes=notes)


async def wait_for_first_version(stage: StageContext, held: ServedVersion) -> bool:
    """Wait until a version is held: who has none takes nothing that others could make meanwhile.

    False if the stage is to leave before that.
    """
    waits = [
        asyncio.create_task(held.wait_for_version(0)),
        asyncio.create_task(stage.leave_requested.wait()),
    ]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return held.version >= 0


def exclude_unverified(begun: ReadPartialRollouts, held: ServedVersion) -> ReadPartialRollouts:
    """What is begun, but for groups with a token of a version that is not verified yet."""

    async def looked_at() -> Mapping[str, Columns]:
        found = await begun()
        return {
            uid: part for uid, part in found.items() if find_newest_version(part) <= held.version
        }

    return looked_at


def find_newest_version(columns: Columns) -> int:
    """The last version that sampled one of the tokens; -1 if they do not say."""
    versions = columns.get("policy_version")
    return -1 if versions is None else int(versions.max(initial=-1))


def count_sampled_tokens(columns: Columns) -> list[int]:
    """How many tokens were sampled of each completion."""
    if "greedy_ids" in columns:
        return [len(columns["greedy_ids"])]
    if "loss_mask" not in columns or "lengths" not in columns:
        return []
    firsts = np.cumsum(columns["lengths"]) - columns["lengths"]
    return [int(count) for count in np.add.reduceat(columns["loss_mask"].astype(int), firsts)]


def measure_completions(experiences: Sequence[Experience]) -> tuple[int, int]:
    """How many completions there are to be scored, and their tokens.

    Prompts are counted, but for those of greedy completions.
    """
    greedy = [e.columns["greedy_ids"] for e in experiences if "greedy_ids" in e.columns]
    if greedy:
        return len(greedy), sum(map(len, greedy))
    infos = [experience.info for experience in experiences if experience.info is not None]
    return sum(len(info.lengths) for info in infos), sum(info.num_tokens for info in infos)


async def score_groups(
    stage: StageContext,
    judge: ComputeFunction,
    serving: ScoringLimits,
    *,
    held: ServedVersion | None = None,
) -> None:
    """Waits for: groups with the columns this stage needs, and, where it follows a model that is
    trained, for the version they were admitted at. Produces: the columns it declares.
    """

    async def compute(experiences: Sequence[Experience]) -> Sequence[StageResult]:
        if held is not None:
            await held.wait_for_version(
                max(experience.admitted_version for experience in experiences)
            )
        rollouts, tokens = measure_completions(experiences)
        async with stage.record_compute(groups=len(experiences), rollouts=rollouts, tokens=tokens):
            return await judge(experiences)

    if held is None or await wait_for_first_version(stage, held):
        desk = InFlightWork(ConcurrencyLimit(serving.max_groups))
        await serve_stage(stage, compute, desk, columns=serving.columns, batch=serving.batch_size)


async def train_policy(
    stage: StageContext,
    control: RunState,
    trainers: Mapping[str, TrainerProtocol],
    config: PipelineConfig,
    *,
    report: Callable[[StepResult], Awaitable[None]],
) -> None:
    """Waits for: the groups of a step, training them as they come. Produces: the next version."""
    while not control.admission.is_finished:
        outcome = await train_step(stage, control, trainers, config)
        if outcome is None:
            break
        await report(outcome)
    await control.publisher.wait_until_published()


async def follow_weights(
    stage: StageContext, follower: FollowerProtocol, channel: WeightChannel, held: ServedVersion
) -> None:
    """Waits for: a version newer than the one held. Produces: that version, in the follower.

    One that cannot be verified is not taken: the old one is served on, the fault is reported with
    the next question, and after PULL_ATTEMPTS in a row the last WeightsError is raised.
    """
    news, failures, soon_s = ReaderState(held.version), 0, SUPERSEDED_RETRY_S
    while True:
        manifest = await channel.wait_for_newer(news, wait_s=POLL_WAIT_S)
        news = ReaderState(held.version)
        if manifest is None:
            continue
        try:
            pull = await load_version(stage, follower, channel, held, manifest)
            news, failures, soon_s = ReaderState(held.version, pull), 0, SUPERSEDED_RETRY_S
        except VersionSupersededError:
            await asyncio.sleep(soon_s)
            soon_s = min(RETRY_S, 2 * soon_s)
        except WeightsError as error:
            failures += 1
            if failures == PULL_ATTEMPTS:
                raise
            news = ReaderState(held.version, fault=WeightFault(manifest.version, str(error)))
            await asyncio.sleep(RETRY_S * 2**failures)


async def load_version(
    stage: StageContext,
    follower: FollowerProtocol,
    channel: WeightChannel,
    held: ServedVersion,
    manifest: WeightManifest,
) -> PullStats:
    """Fetch, verify and load one version; it is held once the follower serves it."""
    version = manifest.version
    if version <= held.version:
        raise WeightsError(f"version {version} was offered, and {held.version} is held already")
    started = time.perf_counter()
    with stage.spans.record_span("pull", version=version):
        fetched = await channel.fetch_weights(manifest)
        async with stage.device_lease.hold("load"):
            loaded = await follower.load_weights(fetched.tensors, version)
            difference = await verify_weights(follower, held.holder, manifest, loaded.verification)
    held.advance_to(version)
    return PullStats(
        pull_s=time.perf_counter() - started,
        pause_s=loaded.pause_s,
        num_bytes=fetched.num_bytes,
        fallback_reason=fetched.fallback_reason,
        num_interrupted=loaded.num_interrupted,
        logprob_diff=difference,
        copied_bytes=fetched.copied_bytes + loaded.copied_bytes,
        warnings=loaded.verification.warnings,
    )


async def verify_weights(
    follower: FollowerProtocol, name: str, manifest: WeightManifest, arrival: LoadVerification
) -> float:
    """How far the follower is from the trainer on the version's probe; NaN without one.

    Raises ProbeError if that is too far, or if not all parameters have arrived.
    """
    who = f"{name}, with version {manifest.version},"
    arrival.raise_on_difference(who)
    if manifest.logprob_check is None:
        return math.nan
    found = await follower.compute_logprobs(manifest.logprob_check.sequences)
    if found is None:
        return math.nan
    return manifest.logprob_check.compare_logprobs(
        found, who, same_parameters=bool(arrival.num_compared)
    )


async def watch_stalls(control: RunState, queue: ExperienceQueue, config: PipelineConfig) -> None:
    """Waits for: work that takes longer than a stall. Produces: a report, and a second delivery."""
    reported: set[tuple[str, str, int]] = set()
    clock = asyncio.get_running_loop().time
    while not control.stop_requested.is_set():
        await asyncio.sleep(min(config.stall_s / 4, 10.0))
        if clock() < control.progress_clock.last_progress_at + config.stall_s:
            continue  # it may wait for those who have its devices
        found = await queue.find_overdue(config.stall_s)
        news = [one for one in found if one.stall_key not in reported]
        reported = {one.stall_key for one in found}
        if news:
            control.on_stall(news)
        if config.on_stall == "redeliver":
            await queue.requeue_overdue(found)
