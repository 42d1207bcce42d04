"""Kills this process at the n-th passage of one moment, once in the life of a run.

Imported by sitecustomize in every process of the run, so the standard library alone is used. The
methods that make a moment are wrapped when their module is imported; what is not there any more is
an AttributeError at that import, which ends the run: a moment never gets lost silently.
"""

import asyncio
import contextvars
import functools
import glob
import json
import os
import signal
import sys
import threading
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

POLL_S = 0.0005
AT_THE_END_S = 60.0
"""A delay that stands for: when the work is done, before anybody hears of it."""


class Fault:
    """The plan, and which actor this process is."""

    def __init__(self, plan):
        self.role = plan["role"]
        self.moment = plan["moment"]
        self.actor = plan["actor"]
        self.passage = plan["passage"]
        self.delay_s = plan["delay_s"]
        self.run_dir = plan["run_dir"]
        self.marker = plan["marker"]
        self.stored = plan["stored"]
        self.is_here = False
        self._passages = 0
        self._lock = threading.Lock()

    def arrive(self, name):
        """This process hosts the actor `name`."""
        if name != self.actor:
            return
        self.is_here = True
        watch = {
            ("generator", "mid_checkpoint"): self._watch_checkpoints,
            ("scorer", "mid_checkpoint"): self._watch_checkpoints,
            ("shard", "mid_fetch"): self._watch_orders,
        }.get((self.role, self.moment))
        if watch is not None:
            threading.Thread(target=watch, daemon=True).start()

    def is_due(self, role, moment):
        """Whether this is the passage: counts one of `moment` if it is that of the plan.

        Never again once somebody was killed, the successor of the one that was included.
        """
        if not self.is_here or (role, moment) != (self.role, self.moment):
            return False
        if os.path.exists(self.marker):
            return False
        with self._lock:
            self._passages += 1
            self._trace(f"{self.actor} {moment} {self._passages}")
            return self._passages == self.passage

    def kill(self):
        """kill -9, and a mark that it was done."""
        with open(self.marker, "x") as marker:
            marker.write(f"{os.getpid()} {time.time()}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_later(self):
        """`kill` once the plan's delay has passed, whatever the process does then."""

        def wait():
            time.sleep(self.delay_s)
            self.kill()

        if self.delay_s < AT_THE_END_S:
            threading.Thread(target=wait, daemon=True).start()

    def at(self, role, moment):
        """A passage that takes no time."""
        if self.is_due(role, moment):
            self.kill()

    def order(self):
        """Have the actor kill itself, from the process that saw the moment; wait until it did."""
        with open(f"{self.marker}.order", "x"):
            pass
        while not os.path.exists(self.marker):
            time.sleep(POLL_S)

    def _watch_orders(self):
        while not os.path.exists(f"{self.marker}.order"):
            time.sleep(POLL_S)
        if not os.path.exists(self.marker):
            self.kill()

    def _watch_checkpoints(self):
        seen: set[str] = set()
        while True:
            found = glob.glob(os.path.join(self.run_dir, "checkpoints", ".step_*.partial"))
            for path in sorted(set(found) - seen):
                seen.add(path)
                if self.is_due(self.role, self.moment):
                    self.kill_later()
            time.sleep(POLL_S)

    def _trace(self, text):
        path = os.environ.get("STREAMRL_CHAOS_TRACE")
        if path:
            with open(path, "a") as file:
                file.write(f"{text}\n")


def wrap(owner, name, around):
    """Put `around(original, ...)` in the place of a method or function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments, **named):
        return around(original, *arguments, **named)

    setattr(owner, name, wrapped)


def wrap_async(owner, name, around):
    """The same for a coroutine function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    async def wrapped(*arguments, **named):
        return await around(original, *arguments, **named)

    setattr(owner, name, wrapped)


async def die_during(fault, work, role, moment):
    """Await what a coroutine function returns, unless the moment is while it is at work."""
    if not fault.is_due(role, moment):
        return await work()
    running = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    fault.kill_later()
    await running
    fault.kill()


def during_async(fault, owner, name, role, moment, named=None):
    """Fire while this coroutine function runs, on a call with the argument `named` if given."""

    async def around(original, *arguments, **keywords):
        work = functools.partial(original, *arguments, **keywords)
        if named not in (None, *keywords):
            return await work()
        return await die_during(fault, work, role, moment)

    wrap_async(owner, name, around)


def during(fault, owner, name, role, moment):
    """The moment is while this function is at work."""

    def around(original, *arguments, **named):
        if not fault.is_due(role, moment):
            return original(*arguments, **named)
        fault.kill_later()
        original(*arguments, **named)
        fault.kill()

    wrap(owner, name, around)


# What is wrapped, by module. A "stage" is what takes from the queue: generator, scorer,
# coordinator.


def queue_client(fault, module):
    queue = module.ExperienceQueue
    role = fault.role

    def init(original, self, shards, holder, **named):
        original(self, shards, holder, **named)
        fault.arrive(holder)

    async def take(original, self, *arguments, **named):
        fault.at(role, "before_take")
        taken = await original(self, *arguments, **named)
        if taken:
            fault.at(role, "after_take")
        return taken

    async def read(original, self, *arguments):
        fault.at(role, "before_take")
        found = await original(self, *arguments)
        fault.at(role, "after_take")
        return found

    wrap(queue, "__init__", init)
    if role in ("generator", "scorer", "coordinator"):
        wrap_async(queue, "lease_groups", take)
    if role == "trainer":
        wrap_async(queue, "read_columns", read)


asked = contextvars.ContextVar("asked", default="")
"""The shard that is being asked."""


def blobs(fault, module):
    """A reader has a shard's answer, and is about to fetch the columns that the shard owns."""
    if fault.stored:
        module.INLINE_BYTES = 0

    async def resolve(original, groups):
        is_stored = any(
            isinstance(blob, module.ObjectStoreBlob) for blobs in groups for blob in blobs
        )
        if is_stored and asked.get() == fault.actor and fault.is_due("shard", "mid_fetch"):
            fault.order()
            # Until Ray has noticed, what a dead process owned can be had.
            await asyncio.sleep(1.0)
        return await original(groups)

    if fault.moment == "mid_fetch":
        fault.is_here = True
        wrap_async(module, "resolve_blobs", resolve)


def remote_shard(fault, module):
    async def ask(original, self, method, *arguments, **named):
        asked.set(self.name)
        work = functools.partial(original, self, method, *arguments, **named)
        if fault.role in ("generator", "scorer") and method.__name__ == "commit_columns":
            return await die_during(fault, work, fault.role, "mid_put")
        return await work()

    wrap_async(module.RemoteShard, "call", ask)


def generation_engine(fault, module):
    engine = module.GenerationEngine
    during_async(fault, engine, "generate_group", "generator", "mid_compute")
    # Groups are sampled with the generator's own settings.
    during_async(fault, engine, "generate", "generator", "mid_evaluation", named="sampling")


def channel(fault, module):
    during_async(fault, module.RemoteWeightChannel, "fetch_weights", "generator", "mid_pull")


def reward_scorer(fault, module):
    moment = "mid_evaluation" if fault.moment == "mid_evaluation" else "mid_compute"
    during_async(fault, module.RewardScorer, "score", "scorer", moment)


def keeper(fault, module):
    def init(original, self, plan, files, *arguments):
        original(self, plan, files, *arguments)
        fault.arrive(os.path.basename(files.journal_dir))

    wrap(module.DurableShard, "__init__", init)


def shard(fault, module):
    async def take(original, self, *arguments, **named):
        fault.at("shard", "before_take")
        grants = await original(self, *arguments, **named)
        if grants:
            fault.at("shard", "after_take")
        return grants

    async def read(original, self, *arguments):
        found = await original(self, *arguments)
        fault.at("shard", "mid_compute")
        return found

    wrap_async(module.QueueShard, "lease_groups", take)
    wrap_async(module.QueueShard, "read_columns", read)


def journal(fault, module):
    """Half of the bytes of a commit reach the file."""

    def write(original, self, frames):
        is_commit = any(b'"kind":"put"' in meta for meta, _ in frames)
        if not is_commit or not fault.is_due("shard", "mid_put"):
            return original(self, frames)
        written = b""
        for frame in frames:
            header = module.encode_header(frame, self._end_offset + len(written))
            written += header + frame[0] + b"".join(frame[1])
        os.write(self.descriptor, written[: len(written) // 2])
        fault.kill()

    wrap(module._JournalWriter, "_write_records", write)


def recovery(fault, module):
    """Half of a snapshot is written."""

    def write(original, path, records):
        if not fault.is_due("shard", "mid_checkpoint"):
            return original(path, records)
        original(path, records)
        os.truncate(path, os.path.getsize(path) // 2)
        fault.kill()

    wrap(module, "write_segment", write)


def trainer_group(fault, module):
    during_async(fault, module.TrainerGroup, "train_round", "coordinator", "mid_compute")


def books(fault, module):
    """A step is on the books and its groups are still in the shards."""

    async def train(original, self, step):
        await original(self, step)
        fault.at("coordinator", "mid_put")

    wrap_async(module.RunLog, "record_step", train)


def checkpoint(fault, module):
    """Right before a checkpoint gets its name, or right after, before the journals are cut."""

    def move(original, partial, final):
        if not fault.is_due("coordinator", "mid_checkpoint"):
            return original(partial, final)
        if fault.delay_s:
            original(partial, final)
        fault.kill()

    wrap(module, "sync_and_rename", move)


def model_trainer(fault, module):
    trainer = module.ModelTrainer
    during(fault, trainer, "train_micro_batch", "trainer", "mid_compute")
    during(fault, trainer, "save_model", "trainer", "mid_checkpoint")

    def init(original, self, *arguments, **named):
        original(self, *arguments, **named)
        fault.at("trainer", "at_start")

    updated = threading.Event()

    def step(original, self, loss_denominator):
        metrics = original(self, loss_denominator)
        if fault.delay_s:
            updated.set()
        else:
            fault.at("trainer", "mid_put")
        return metrics

    def full_state(original, self):
        is_published = updated.is_set()
        updated.clear()
        for number, item in enumerate(original(self)):
            if number == 1 and is_published:
                fault.at("trainer", "mid_put")
            yield item

    wrap(trainer, "__init__", init)
    wrap(trainer, "step", step)
    wrap(trainer, "full_state", full_state)


def driver(fault, module):
    """The row of a step is on its way to the disk."""

    def step(original, self, *arguments):
        fault.arrive("driver")
        fault.at("driver", "mid_step")
        original(self, *arguments)

    wrap(module.JsonlSink, "log_step", step)


PATCHES = {
    "streamrl.telemetry.sinks": driver,
    "streamrl.buffer.client": queue_client,
    "streamrl.actors.transport.blob_store": blobs,
    "streamrl.actors.queue_shard": remote_shard,
    "streamrl.actors.replica": channel,
    "streamrl.engines.generation.generation_engine": generation_engine,
    "streamrl.rewards.reward_scorer": reward_scorer,
    "streamrl.buffer.durable_shard": keeper,
    "streamrl.buffer.shard": shard,
    "streamrl.buffer.log.journal": journal,
    "streamrl.buffer.recovery": recovery,
    "streamrl.actors.coordination.trainer_group": trainer_group,
    "streamrl.buffer.books.run_log": books,
    "streamrl.run_dir.checkpoint": checkpoint,
    "streamrl.engines.training.model_trainer": model_trainer,
}


class PatchOnImport(MetaPathFinder):
    """Finds the modules of PATCHES as the path does, and wraps them once they have run."""

    def __init__(self, fault):
        self._fault = fault

    def find_spec(self, name, path, target=None):
        if name not in PATCHES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_patch(module):
            run(module)
            PATCHES[name](self._fault, module)

        # On the loader of this module alone, hence no subclass.
        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


def install(plan):
    """Prepare the fault of a plan, given as JSON, in this process."""
    sys.meta_path.insert(0, PatchOnImport(Fault(json.loads(plan))))
