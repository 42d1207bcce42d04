"""The loops of the stream, with the inputs and outputs of each stage. Read this first.

    admit ---> generate ---> score (reward, reference, value, ...) ---> train (policy, critic)
      ^           ^                                    ^                   |        |
      |           +---- follow_weights <-- publish ----|-------------------+        |
      | credits                                        +--- follow_weights <-- publish
      +---------------------------- version + 1 ---------------------------+

The arrows of the top row are the experience queue: a stage takes a group once its required
columns exist, computes, and commits its own columns. `publish` and `follow_weights` carry the
weights of a version from a trainer to the replicas that serve it. `version + 1` and `credits` are
the run state: a finished step raises the version, which frees credits to admit further prompts.

Micro-batch k+1 is generated while k is scored and trained. Staleness credits alone
(`max_staleness`) bound how far generation runs ahead. The device lease alone decides whether two
stages compute at the same time. So no loop has a branch per mode, and sync training is
`max_staleness: 0`. The loops know no actor, engine or algorithm: actors host them, and tests run
them in one process on a virtual clock. Where rows of the data give completions, as for supervised
fine-tuning, `score_groups` in the coordinator commits them, in place of `generate` and `score`.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from streamrl.buffer import ExperienceQueue
from streamrl.errors import (
    EpisodeError,
    VersionNotStoredError,
    VersionSupersededError,
    WeightsError,
)
from streamrl.messages import Columns, Experience, Prompt
from streamrl.stream.protocols import (
    FinishedCallback,
    ReadPartialRollouts,
    SampleFunction,
    StageContext,
    StepResult,
    TrainerProtocol,
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
from streamrl.weights.versions import (
    FollowerProtocol,
    FollowerState,
    PullStats,
    WeightChannel,
    WeightFault,
)

FOLLOW_WAIT_S = 20.0
"""Longest wait of a follower's request for a newer version, s: the coordinator answers hundreds."""
PULL_ATTEMPTS = 5
"""Consecutive failed attempts to load a version before the follower is replaced."""
WATCH_INTERVAL_S = 2.0
"""Longest time between two looks for stalls and outages, s."""
RETRY_S = 0.25
"""Base of the exponential backoff after a failed load, s: the nth retry waits RETRY_S * 2**n."""
MAX_NOT_STORED_RETRY_S = 5.0
"""Longest delay before asking again for a version that was not stored, s."""
SUPERSEDED_RETRY_S = 0.01
"""First delay before retrying a superseded version, s; doubles up to RETRY_S."""


# The loops, in the order in which data flows.


async def admit_prompts(
    run_state: RunState, queue: ExperienceQueue, *, wait_s: float = POLL_WAIT_S
) -> None:
    """Insert prompts into the queue as staleness credits allow, until the run stops.

    Consumes: the stream of prompts, and prompts to readmit. Waits for: staleness credits. Produces:
    prompts in the queue, tagged with the version at admission. Unblocked by: `train_policy`, since
    each step raises the version and returns credits, and by dropped groups.
    """
    while not run_state.stop_requested.is_set():
        # Readmitted prompts need no credit, and may arrive during the wait for one.
        if (
            run_state.prompts_to_insert
            or await run_state.admission.wait_for_credit(wait_s)
            or run_state.prompts_to_insert
        ):
            await run_state.fill_queue(queue)


async def generate_rollouts(
    stage: StageContext,
    sample: SampleFunction,
    served: ServedVersion,
    *,
    limit: ConcurrencyLimit,
    read_partials: ReadPartialRollouts,
) -> None:
    """Sample groups of rollouts, several at once, until the stage must leave.

    Consumes: prompts. Waits for: a prompt, a free slot, the version at which the prompt was
    admitted. Produces: the columns that `sample` returns, such as the rollouts of the group; in a
    run it is a method of GenerationEngine or, with environments, of EpisodeDriver, which
    `actors/generator.py` chooses by the stage's name.
    Unblocked by: `admit_prompts`, its own finished rollouts, and `follow_weights`. While running,
    the loop saves partial rollouts so that another generator can resume them. `sample` holds the
    device lease while it computes: for the whole group (`hold_devices_per_group`), or turn by turn.
    """
    partial_saver = PartialRolloutSaver(stage.queue, exclude_unverified(read_partials, served))
    in_flight = InFlightWork(limit)

    async def compute(experiences: Sequence[Experience]) -> Sequence[StageResult]:
        (experience,) = experiences
        assert experience.prompt is not None
        await served.wait_for_version(experience.admitted_version)
        with partial_saver.track_lease(experience.lease):
            try:
                columns = await sample(
                    experience.prompt, experience.partial_rollouts, in_flight.make_slot_releaser()
                )
            except EpisodeError as error:
                return [error]
        # Commit no token of a version before that version is verified.
        await served.wait_for_version(find_newest_version(columns))
        return [columns]

    if await wait_for_first_version(stage, served):
        await serve_stage(
            stage, compute, in_flight, columns=(), batch=1, partial_saver=partial_saver
        )


def hold_devices_per_group(stage: StageContext, sample: SampleFunction) -> SampleFunction:
    """Wrap `sample` to hold the stage's device lease, and record a span, while it runs."""

    async def sample_on_devices(
        prompt: Prompt, partial_rollouts: Columns | None, on_finished: FinishedCallback
    ) -> Columns:
        prompt_tokens = len(prompt.token_ids)
        async with stage.hold_devices(uid=prompt.uid, prompt=prompt_tokens) as span_facts:
            columns = await sample(prompt, partial_rollouts, on_finished)
            span_facts["lengths"] = " ".join(map(str, count_sampled_tokens(columns)))
        return columns

    return sample_on_devices


async def wait_for_first_version(stage: StageContext, served: ServedVersion) -> bool:
    """Wait until this process serves a version; return False if the stage must leave first.

    A replica without a version leases nothing: replicas with a version can take the work.
    """
    waits = [
        asyncio.create_task(served.wait_for_version(0)),
        asyncio.create_task(stage.leave_requested.wait()),
    ]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return served.version >= 0


def exclude_unverified(
    read_partials: ReadPartialRollouts, served: ServedVersion
) -> ReadPartialRollouts:
    """Wrap `read_partials` to omit groups with a token of a version that is not verified yet."""

    async def read_verified() -> Mapping[str, Columns]:
        partials = await read_partials()
        return {
            uid: columns
            for uid, columns in partials.items()
            if find_newest_version(columns) <= served.version
        }

    return read_verified


def find_newest_version(columns: Columns) -> int:
    """Return the newest version that sampled a token of a group; -1 without policy_version."""
    versions = columns.get("policy_version")
    return -1 if versions is None else int(versions.max(initial=-1))


def count_sampled_tokens(columns: Columns) -> list[int]:
    """Return the number of sampled tokens of each rollout; [] for columns without rollouts."""
    if "greedy_ids" in columns:
        return [len(columns["greedy_ids"])]
    if "loss_mask" not in columns or "lengths" not in columns:
        return []
    firsts = np.cumsum(columns["lengths"]) - columns["lengths"]
    return [int(count) for count in np.add.reduceat(columns["loss_mask"].astype(int), firsts)]


def measure_completions(experiences: Sequence[Experience]) -> tuple[int, int]:
    """Return the number of completions to score and the number of their tokens.

    Tokens include the prompt, except for greedy completions.
    """
    greedy = [e.columns["greedy_ids"] for e in experiences if "greedy_ids" in e.columns]
    if greedy:
        return len(greedy), sum(map(len, greedy))
    infos = [experience.info for experience in experiences if experience.info is not None]
    return sum(len(info.lengths) for info in infos), sum(info.num_tokens for info in infos)


async def score_groups(
    stage: StageContext,
    score: ComputeFunction,
    columns: Sequence[str],
    in_flight: InFlightWork,
    batch_size: int,
    *,
    served: ServedVersion | None = None,
) -> None:
    """Compute reward or model columns for groups of rollouts, until the stage must leave.

    Consumes: groups with the required columns. Waits for: such groups and, if the scorer follows a
    trained model, the version at which they were admitted. Produces: the declared columns, as
    `score` returns them (RewardScorer) or as the ranks of a model commit them
    (`actors/rank_calls.py`).
    Unblocked by: `generate_rollouts` and other scorers, which commit columns, and `follow_weights`.
    columns: those that the scorer leases; none if the ranks of a model read the groups, which then
    record the stage's spans, too. in_flight: limits groups and calls at a time. batch_size: most
    groups per call.
    """

    async def compute(experiences: Sequence[Experience]) -> Sequence[StageResult]:
        if served is not None:
            await served.wait_for_version(
                max(experience.admitted_version for experience in experiences)
            )
        if not columns:
            async with stage.device_lease.hold(stage.name):
                return await score(experiences)
        rollouts, tokens = measure_completions(experiences)
        async with stage.hold_devices(groups=len(experiences), rollouts=rollouts, tokens=tokens):
            return await score(experiences)

    if served is None or await wait_for_first_version(stage, served):
        await serve_stage(stage, compute, in_flight, columns=columns, batch=batch_size)


async def train_policy(
    stage: StageContext,
    run_state: RunState,
    trainers: Mapping[str, TrainerProtocol],
    config: PipelineConfig,
    *,
    report: Callable[[StepResult], Awaitable[None]],
) -> None:
    """Run training steps until the run is finished or stopping; `report` each step's result.

    Consumes: groups with all columns. Waits for: the groups of a step, trained as they arrive.
    Produces: the next version. Unblocked by: `generate_rollouts` and `score_groups`, whichever
    commits the last column of a group.
    """
    while not run_state.admission.is_finished:
        outcome = await train_step(stage, run_state, trainers, config)
        if outcome is None:
            break
        await report(outcome)
    await run_state.publisher.wait_until_published()


async def follow_weights(
    stage: StageContext, follower: FollowerProtocol, channel: WeightChannel, served: ServedVersion
) -> None:
    """Load every new version of a trained model into a follower, forever.

    Consumes: published versions. Waits for: a version newer than the served one. Produces: that
    version in the follower. Unblocked by: `train_policy`, which publishes. If verification fails,
    the follower keeps serving the old version and reports the fault with its next request. After
    PULL_ATTEMPTS consecutive failures the last WeightsError is raised. A version that was not
    stored for this follower counts as none: it waits for that version's copy, or the next version.
    """
    state, failures, retry_s = FollowerState(served.version), 0, SUPERSEDED_RETRY_S
    while True:
        manifest = await channel.wait_for_newer(state, wait_s=FOLLOW_WAIT_S)
        state = FollowerState(served.version)
        if manifest is None:
            continue
        try:
            pull = await pull_version(stage, follower, channel, served, manifest)
            state, failures, retry_s = FollowerState(served.version, pull), 0, SUPERSEDED_RETRY_S
        except VersionSupersededError:
            await asyncio.sleep(retry_s)
            retry_s = min(RETRY_S, 2 * retry_s)
        except VersionNotStoredError as error:
            state = FollowerState(served.version, fault=WeightFault(manifest.version, str(error)))
            retry_s = min(MAX_NOT_STORED_RETRY_S, 2 * max(retry_s, RETRY_S))
            await asyncio.sleep(retry_s)
        except WeightsError as error:
            failures += 1
            if failures == PULL_ATTEMPTS:
                raise
            state = FollowerState(served.version, fault=WeightFault(manifest.version, str(error)))
            await asyncio.sleep(RETRY_S * 2**failures)


async def pull_version(
    stage: StageContext,
    follower: FollowerProtocol,
    channel: WeightChannel,
    served: ServedVersion,
    manifest: WeightManifest,
) -> PullStats:
    """Fetch a version, load it into the follower, verify it, and serve it.

    Returns statistics of the pull. Raises WeightsError if a step fails.
    """
    version = manifest.version
    if version <= served.version:
        raise WeightsError(f"version {version} was offered, but {served.version} is served already")
    started = time.perf_counter()
    with stage.spans.record_span("pull", version=version):
        fetched = await channel.fetch_weights(manifest)
        async with stage.device_lease.hold("load"):
            loaded = await follower.load_weights(fetched.tensors, version)
            difference = await verify_weights(
                follower, served.follower, manifest, loaded.verification
            )
    served.advance_to(version)
    return PullStats(
        pull_s=time.perf_counter() - started,
        pause_s=loaded.pause_s,
        num_bytes=fetched.num_bytes,
        fallback_reason=fetched.fallback_reason,
        num_interrupted=loaded.num_interrupted,
        logprob_diff=difference,
        copied_bytes=fetched.copied_bytes + loaded.copied_bytes,
        warnings=loaded.verification.warnings,
        layouts=loaded.layouts,
    )


async def verify_weights(
    follower: FollowerProtocol, name: str, manifest: WeightManifest, verification: LoadVerification
) -> float:
    """Compare the follower's logprobs with the trainer's; return the difference, NaN if unchecked.

    Raises LogprobCheckError if the difference is too large or parameters are missing.
    """
    subject = f"{name}, with version {manifest.version},"
    verification.raise_on_difference(subject)
    if manifest.logprob_check is None:
        return math.nan
    logprobs = await follower.compute_logprobs(manifest.logprob_check.sequences)
    if logprobs is None:
        return math.nan
    return manifest.logprob_check.compare_logprobs(
        logprobs, subject, same_parameters=bool(verification.num_compared)
    )


async def watch_stalls(run_state: RunState, queue: ExperienceQueue, config: PipelineConfig) -> None:
    """Report stalled work, and requeue it if `on_stall` is "redeliver", until the run stops.

    Consumes: outages of services, and leases without progress for `stall_s`. Waits for: the next
    check, a quarter of `stall_s` later at most. Produces: a report per outage and stall and, if
    set, a redelivery. Unblocked by: the clock. Raises ServiceOutageError after `outage_s`.
    """
    reported: set[tuple[str, str, int]] = set()
    clock = asyncio.get_running_loop().time
    while not run_state.stop_requested.is_set():
        await asyncio.sleep(min(config.stall_s / 4, config.outage_s / 4, WATCH_INTERVAL_S))
        await run_state.observe_outages(config.outage_s)
        if clock() < run_state.progress_clock.last_progress_at + config.stall_s:
            continue  # the overdue work may be waiting for stages that hold its devices
        overdue = await queue.find_overdue(config.stall_s)
        new_stalls = [stall for stall in overdue if stall.stall_key not in reported]
        reported = {stall.stall_key for stall in overdue}
        if new_stalls:
            run_state.on_stall(new_stalls, await run_state.describe_waits())
        if config.on_stall == "redeliver":
            await queue.requeue_overdue(overdue)
