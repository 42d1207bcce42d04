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
from streamrl.errors import SupersededError, WeightsError
from streamrl.messages import Columns, Experience
from streamrl.stream.protocols import (
    Begun,
    Follower,
    Sample,
    Stage,
    StepOutcome,
    Trainer,
    WeightChannel,
)
from streamrl.stream.run_state import Control, PipelineConfig
from streamrl.stream.stage_worker import WAIT_S, Compute, Desk, Notes, Places, Result, serve
from streamrl.stream.train_step import train_step
from streamrl.weights import Arrival, HeldVersion, WeightManifest
from streamrl.weights.metrics import Pull
from streamrl.weights.version_registry import Fault, ReaderState

PULL_ATTEMPTS = 5
"""So many times in a row a follower tries to take up a version before it is replaced."""
RETRY_S = 0.25
"""Half of the time before the second try, which is doubled for each one after it, s."""
SOON_S = 0.01
"""Time to the first look for a version that is on its way, likewise, s; never more than RETRY_S."""


@dataclass(frozen=True)
class Serving:
    """What a scorer takes: groups with these columns, at most `most` of them, `batch` at once."""

    columns: Sequence[str]
    most: int
    batch: int


# The loops, in the order in which data flows.


async def admit(control: Control, queue: ExperienceQueue, *, wait_s: float = WAIT_S) -> None:
    """Waits for: credits. Produces: prompts in the queue, with the version they are admitted at."""
    while not control.stopping.is_set():
        if control.returning or await control.admission.wait_credit(wait_s) or control.returning:
            await control.admit_new(queue)


async def generate(
    stage: Stage, sample: Sample, held: HeldVersion, *, places: Places, begun: Begun
) -> None:
    """Waits for: a prompt, a free place, the version the prompt was admitted at.

    Produces: what is sampled for it, such as the rollouts of its group; meanwhile, for who may have
    to go on with it, what is `begun` of it.
    """
    notes = Notes(stage.queue, verified(begun, held))
    desk = Desk(places)

    async def compute(experiences: Sequence[Experience]) -> Sequence[Result]:
        (experience,) = experiences
        assert experience.prompt is not None
        await held.at_least(experience.admitted_version)
        prompt_tokens = len(experience.prompt.token_ids)
        async with stage.computing(uid=experience.uid, prompt=prompt_tokens) as known:
            with notes.of(experience.lease):
                columns = await sample(experience.prompt, experience.begun, desk.clearing())
            known["lengths"] = " ".join(map(str, sampled_lengths(columns)))
        # Nothing leaves that was sampled by a version which is not verified yet.
        await held.at_least(newest_version(columns))
        return [columns]

    if await serves(stage, held):
        await serve(stage, compute, desk, columns=(), batch=1, notes=notes)


async def serves(stage: Stage, held: HeldVersion) -> bool:
    """Wait until a version is held: who has none takes nothing that others could make meanwhile.

    False if the stage is to leave before that.
    """
    waits = [asyncio.create_task(held.at_least(0)), asyncio.create_task(stage.leaving.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return held.version >= 0


def verified(begun: Begun, held: HeldVersion) -> Begun:
    """What is begun, but for groups with a token of a version that is not verified yet."""

    async def looked_at() -> Mapping[str, Columns]:
        found = await begun()
        return {uid: part for uid, part in found.items() if newest_version(part) <= held.version}

    return looked_at


def newest_version(columns: Columns) -> int:
    """The last version that sampled one of the tokens; -1 if they do not say."""
    versions = columns.get("policy_version")
    return -1 if versions is None else int(versions.max(initial=-1))


def sampled_lengths(columns: Columns) -> list[int]:
    """How many tokens were sampled of each completion."""
    if "greedy_ids" in columns:
        return [len(columns["greedy_ids"])]
    if "loss_mask" not in columns or "lengths" not in columns:
        return []
    firsts = np.cumsum(columns["lengths"]) - columns["lengths"]
    return [int(count) for count in np.add.reduceat(columns["loss_mask"].astype(int), firsts)]


def size_of(experiences: Sequence[Experience]) -> tuple[int, int]:
    """How many completions there are to be scored, and their tokens.

    Prompts are counted, but for those of greedy completions.
    """
    greedy = [e.columns["greedy_ids"] for e in experiences if "greedy_ids" in e.columns]
    if greedy:
        return len(greedy), sum(map(len, greedy))
    infos = [experience.info for experience in experiences if experience.info is not None]
    return sum(len(info.lengths) for info in infos), sum(info.num_tokens for info in infos)


async def score(
    stage: Stage,
    judge: Compute,
    serving: Serving,
    *,
    held: HeldVersion | None = None,
) -> None:
    """Waits for: groups with the columns this stage needs, and, where it follows a model that is
    trained, for the version they were admitted at. Produces: the columns it declares.
    """

    async def compute(experiences: Sequence[Experience]) -> Sequence[Result]:
        if held is not None:
            await held.at_least(max(experience.admitted_version for experience in experiences))
        rollouts, tokens = size_of(experiences)
        async with stage.computing(groups=len(experiences), rollouts=rollouts, tokens=tokens):
            return await judge(experiences)

    if held is None or await serves(stage, held):
        desk = Desk(Places(serving.most))
        await serve(stage, compute, desk, columns=serving.columns, batch=serving.batch)


async def train(
    stage: Stage,
    control: Control,
    trainers: Mapping[str, Trainer],
    config: PipelineConfig,
    *,
    report: Callable[[StepOutcome], Awaitable[None]],
) -> None:
    """Waits for: the groups of a step, training them as they come. Produces: the next version."""
    while not control.admission.finished:
        outcome = await train_step(stage, control, trainers, config)
        if outcome is None:
            break
        await report(outcome)
    await control.publishing.settle()


async def follow_weights(
    stage: Stage, follower: Follower, channel: WeightChannel, held: HeldVersion
) -> None:
    """Waits for: a version newer than the one held. Produces: that version, in the follower.

    One that cannot be verified is not taken: the old one is served on, the fault is reported with
    the next question, and after PULL_ATTEMPTS in a row the last WeightsError is raised.
    """
    news, failures, soon_s = ReaderState(held.version), 0, SOON_S
    while True:
        manifest = await channel.newest(news, wait_s=WAIT_S)
        news = ReaderState(held.version)
        if manifest is None:
            continue
        try:
            pull = await take_up(stage, follower, channel, held, manifest)
            news, failures, soon_s = ReaderState(held.version, pull), 0, SOON_S
        except SupersededError:
            await asyncio.sleep(soon_s)
            soon_s = min(RETRY_S, 2 * soon_s)
        except WeightsError as error:
            failures += 1
            if failures == PULL_ATTEMPTS:
                raise
            news = ReaderState(held.version, fault=Fault(manifest.version, str(error)))
            await asyncio.sleep(RETRY_S * 2**failures)


async def take_up(
    stage: Stage,
    follower: Follower,
    channel: WeightChannel,
    held: HeldVersion,
    manifest: WeightManifest,
) -> Pull:
    """Fetch, verify and load one version; it is held once the follower serves it."""
    version = manifest.version
    if version <= held.version:
        raise WeightsError(f"version {version} was offered, and {held.version} is held already")
    started = time.perf_counter()
    with stage.spans.span("pull", version=version):
        fetched = await channel.fetch(manifest)
        async with stage.lease.hold("load"):
            loaded = await follower.load_weights(fetched.tensors, version)
            difference = await verify_model(follower, held.holder, manifest, loaded.arrival)
    held.advance(version)
    return Pull(
        pull_s=time.perf_counter() - started,
        pause_s=loaded.pause_s,
        num_bytes=fetched.num_bytes,
        detour=fetched.detour,
        interrupted=loaded.interrupted,
        probe_diff=difference,
        copied_bytes=fetched.copied_bytes + loaded.copied_bytes,
        warnings=loaded.arrival.warnings,
    )


async def verify_model(
    follower: Follower, name: str, manifest: WeightManifest, arrival: Arrival
) -> float:
    """How far the follower is from the trainer on the version's probe; NaN without one.

    Raises ProbeError if that is too far, or if not all parameters have arrived.
    """
    who = f"{name}, with version {manifest.version},"
    arrival.check(who)
    if manifest.probe is None:
        return math.nan
    found = await follower.probe(manifest.probe.sequences)
    if found is None:
        return math.nan
    return manifest.probe.check(found, who, same_parameters=bool(arrival.num_compared))


async def watch_stalls(control: Control, queue: ExperienceQueue, config: PipelineConfig) -> None:
    """Waits for: work that takes longer than a stall. Produces: a report, and a second delivery."""
    reported: set[tuple[str, str, int]] = set()
    clock = asyncio.get_running_loop().time
    while not control.stopping.is_set():
        await asyncio.sleep(min(config.stall_s / 4, 10.0))
        if clock() < control.pulse.at + config.stall_s:
            continue  # it may wait for those who have its devices
        found = await queue.overdue(config.stall_s)
        news = [one for one in found if one.key not in reported]
        reported = {one.key for one in found}
        if news:
            control.on_stall(news)
        if config.on_stall == "redeliver":
            await queue.take_back(found)
