"""Fault injection: kill -9 this process at the n-th hit of a fault point, once per run.

sitecustomize imports this module in every process of the run, so it needs only the standard
library. Methods of a fault point are wrapped when their module is imported. If streamrl renames
such a method, the import raises AttributeError and the run fails: no fault point is lost silently.
"""

import asyncio
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
"""Sentinel delay: kill when the work is done and before its result is returned."""


class PlannedFault:
    """Planned kill of an actor, enabled in the process that hosts the actor."""

    def __init__(self, plan):
        self.role = plan["role"]
        self.point = plan["point"]
        self.actor = plan["actor"]
        self.hit = plan["hit"]
        self.delay_s = plan["delay_s"]
        self.run_dir = plan["run_dir"]
        self.marker = plan["marker"]
        self.stored = plan["stored"]
        self.is_target = False
        self._hits = 0
        self._lock = threading.Lock()

    def enable_in_actor(self, name):
        """Enable the fault if this process, which hosts the actor `name`, is its target."""
        if name != self.actor:
            return
        self.is_target = True
        if self.point == "mid_checkpoint" and self.role in ("generator", "scorer"):
            threading.Thread(target=self._watch_checkpoints, daemon=True).start()

    def count_hit(self, role, point):
        """Count a hit of the planned fault point; return whether the kill is due.

        The marker file keeps a restarted actor from being killed again.
        """
        if not self.is_target or (role, point) != (self.role, self.point):
            return False
        if os.path.exists(self.marker):
            return False
        with self._lock:
            self._hits += 1
            return self._hits == self.hit

    def kill(self):
        """Write the marker file, then kill -9 this process."""
        with open(self.marker, "x") as marker:
            marker.write(f"{os.getpid()} {time.time()}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_later(self):
        """Kill from a thread after the planned delay, unless the delay is the sentinel."""

        def wait():
            time.sleep(self.delay_s)
            self.kill()

        if self.delay_s < AT_THE_END_S:
            threading.Thread(target=wait, daemon=True).start()

    def kill_if_due(self, role, point):
        """Count a hit of a fault point without duration; kill at the planned hit."""
        if self.count_hit(role, point):
            self.kill()

    def _watch_checkpoints(self):
        seen: set[str] = set()
        while True:
            paths = glob.glob(os.path.join(self.run_dir, "checkpoints", ".step_*.partial"))
            for path in sorted(set(paths) - seen):
                seen.add(path)
                if self.count_hit(self.role, self.point):
                    self.kill_later()
            time.sleep(POLL_S)


def wrap(owner, name, around):
    """Replace a method or function by `around(original, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments, **named):
        return around(original, *arguments, **named)

    setattr(owner, name, wrapped)


def wrap_async(owner, name, around):
    """Replace a coroutine function by `around(original, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    async def wrapped(*arguments, **named):
        return await around(original, *arguments, **named)

    setattr(owner, name, wrapped)


async def run_and_kill(fault, work, role, point):
    """Await a coroutine function; if the hit is due, kill while the function runs or at its end."""
    if not fault.count_hit(role, point):
        return await work()
    running = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    fault.kill_later()
    await running
    fault.kill()


def kill_during_async(fault, owner, name, role, point):
    """Kill during this coroutine function or at its end."""

    async def around(original, *arguments, **named):
        work = functools.partial(original, *arguments, **named)
        return await run_and_kill(fault, work, role, point)

    wrap_async(owner, name, around)


def kill_during(fault, owner, name, role, point):
    """Kill while this function runs or at its end."""

    def around(original, *arguments, **named):
        if not fault.count_hit(role, point):
            return original(*arguments, **named)
        fault.kill_later()
        original(*arguments, **named)
        fault.kill()

    wrap(owner, name, around)


# Patches, by module.


def patch_queue_client(fault, module):
    queue = module.ExperienceQueue
    role = fault.role

    def init(original, self, shards, holder, **named):
        original(self, shards, holder, **named)
        fault.enable_in_actor(holder)

    async def take(original, self, *arguments, **named):
        fault.kill_if_due(role, "before_take")
        taken = await original(self, *arguments, **named)
        if taken:
            fault.kill_if_due(role, "after_take")
        return taken

    async def read(original, self, *arguments):
        fault.kill_if_due(role, "before_take")
        columns = await original(self, *arguments)
        fault.kill_if_due(role, "after_take")
        return columns

    wrap(queue, "__init__", init)
    if role in ("generator", "scorer", "coordinator"):
        wrap_async(queue, "lease_groups", take)
    if role == "trainer":
        wrap_async(queue, "read_columns", read)


def patch_remote_shard(fault, module):
    if fault.stored:
        module.INLINE_BYTES = 0

    async def ask(original, self, method, *arguments, **named):
        work = functools.partial(original, self, method, *arguments, **named)
        if fault.role in ("generator", "scorer") and method.__name__ == "commit_columns":
            return await run_and_kill(fault, work, fault.role, "mid_put")
        return await work()

    wrap_async(module.RemoteShard, "call", ask)


def patch_generation_engine(fault, module):
    kill_during_async(fault, module.GenerationEngine, "generate_group", "generator", "mid_compute")


def patch_host_pool(fault, module):
    kill_during_async(fault, module.HostedSession, "step", "generator", "mid_episode")


def patch_environment_host(fault, module):
    """Kill a host process during a step of the environment."""
    if fault.role == "host":
        fault.is_target = True

    async def handle(original, self, request):
        work = functools.partial(original, self, request)
        if request.operation is not module.HostOperation.STEP:
            return await work()
        return await run_and_kill(fault, work, "host", "mid_episode")

    wrap_async(module.EnvironmentHost, "__call__", handle)


def patch_reward_scorer(fault, module):
    kill_during_async(fault, module.RewardScorer, "score", "scorer", "mid_compute")


def patch_durable_shard(fault, module):
    def init(original, self, plan, files, *arguments):
        original(self, plan, files, *arguments)
        fault.enable_in_actor(os.path.basename(files.journal_dir))

    def write(original, path, records):
        """Kill a shard after half of its snapshot is written."""
        if not fault.count_hit("shard", "mid_checkpoint"):
            return original(path, records)
        original(path, records)
        os.truncate(path, os.path.getsize(path) // 2)
        fault.kill()

    wrap(module.DurableShard, "__init__", init)
    wrap(module, "write_segment", write)


def patch_queue_shard(fault, module):
    async def take(original, self, *arguments, **named):
        fault.kill_if_due("shard", "before_take")
        grants = await original(self, *arguments, **named)
        if grants:
            fault.kill_if_due("shard", "after_take")
        return grants

    async def read(original, self, *arguments):
        columns = await original(self, *arguments)
        fault.kill_if_due("shard", "mid_compute")
        return columns

    wrap_async(module.QueueShard, "lease_groups", take)
    wrap_async(module.QueueShard, "read_columns", read)


def patch_journal(fault, module):
    """Kill a shard after half of a commit's bytes reach its journal."""

    def write(original, self, frames):
        is_commit = any(b'"kind":"put"' in meta for meta, _ in frames)
        if not is_commit or not fault.count_hit("shard", "mid_put"):
            return original(self, frames)
        written = b""
        for frame in frames:
            header = module.encode_header(frame, self._end_offset + len(written))
            written += header + frame[0] + b"".join(frame[1])
        os.write(self.descriptor, written[: len(written) // 2])
        fault.kill()

    wrap(module._JournalWriter, "_write_records", write)


def patch_trainer_group(fault, module):
    kill_during_async(fault, module.TrainerGroup, "train_round", "coordinator", "mid_compute")


def patch_run_log(fault, module):
    """Kill the coordinator after a step is in the run log, with its groups still in the shards."""

    async def train(original, self, step):
        await original(self, step)
        fault.kill_if_due("coordinator", "mid_put")

    wrap_async(module.RunLog, "record_step", train)


def patch_checkpoint(fault, module):
    """Kill the coordinator before a checkpoint is renamed, or after, before journals are cut."""

    def move(original, partial, final):
        if not fault.count_hit("coordinator", "mid_checkpoint"):
            return original(partial, final)
        if fault.delay_s:
            original(partial, final)
        fault.kill()

    wrap(module, "sync_and_rename", move)


def patch_model_trainer(fault, module):
    trainer = module.ModelTrainer
    kill_during(fault, trainer, "train_micro_batch", "trainer", "mid_compute")
    kill_during(fault, trainer, "save_model", "trainer", "mid_checkpoint")

    updated = threading.Event()

    def update(original, self, *arguments):
        metrics = original(self, *arguments)
        if fault.delay_s:
            updated.set()
        else:
            fault.kill_if_due("trainer", "mid_put")
        return metrics

    def full_state(original, self):
        is_published = updated.is_set()
        updated.clear()
        for number, item in enumerate(original(self)):
            if number == 1 and is_published:
                fault.kill_if_due("trainer", "mid_put")
            yield item

    wrap(trainer, "update", update)
    wrap(trainer, "full_state", full_state)


PATCHES = {
    "streamrl.buffer.client": patch_queue_client,
    "streamrl.actors.queue_shard": patch_remote_shard,
    "streamrl.engines.generation.generation_engine": patch_generation_engine,
    "streamrl.environments.hosts.host_pool": patch_host_pool,
    "streamrl.environments.hosts.environment_host": patch_environment_host,
    "streamrl.rewards.reward_scorer": patch_reward_scorer,
    "streamrl.buffer.durable_shard": patch_durable_shard,
    "streamrl.buffer.shard": patch_queue_shard,
    "streamrl.buffer.journal": patch_journal,
    "streamrl.actors.coordination.trainer_group": patch_trainer_group,
    "streamrl.buffer.run_log": patch_run_log,
    "streamrl.run_dir.checkpoint": patch_checkpoint,
    "streamrl.engines.training.model_trainer": patch_model_trainer,
}


class PatchOnImport(MetaPathFinder):
    """Import hook that applies PATCHES to modules after their import."""

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

        # Each spec has its own loader, so this affects no other module.
        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


def install(plan):
    """Install the import hook for a plan, given as JSON."""
    sys.meta_path.insert(0, PatchOnImport(PlannedFault(json.loads(plan))))
