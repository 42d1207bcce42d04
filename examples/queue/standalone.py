"""The experience queue alone, without training: two producers, a scorer, a consumer.

python examples/queue/standalone.py

Halfway, the script kills a shard with SIGKILL; every group still arrives exactly once.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import ray

from streamrl.actors.launch.local_ray import start_local_ray
from streamrl.actors.queue_shard import RemoteShard, start_shards
from streamrl.buffer import ExperienceQueue, QueueConfig, ShardCapacity, StageSchema
from streamrl.messages import ROLLOUT_COLUMNS, Array, Columns, Experience, Prompt, make_uid

STAGES = {
    "generate": StageSchema(needs=(), produces=ROLLOUT_COLUMNS),
    "reward": StageSchema(needs=("token_ids",), produces=("scores",)),
    "train": StageSchema(needs=("scores",), produces=()),
}
NUM_GROUPS, GROUP_SIZE = 400, 4
TIMEOUT_S = 60.0


class StageWorker:
    """Ray actor that leases groups of a stage, computes its columns and commits them."""

    def __init__(self, shards: list[RemoteShard], name: str) -> None:
        self.queue = ExperienceQueue(shards, name)

    @ray.method
    async def run(self, stage: str, compute: Callable[[Experience], Columns]) -> None:
        """Process groups forever.

        A computation longer than queue.lease_s must call `queue.renew_leases` in between.
        """
        needs = STAGES[stage].needs
        while True:
            groups = await self.queue.lease_groups(stage, max_groups=4, columns=needs, wait_s=1.0)
            await self.queue.commit_columns([(group.lease, compute(group)) for group in groups])


# Called, not used as a decorator, so that type checkers see `remote` (with @ray.method above).
WORKER = ray.remote(num_cpus=0)(StageWorker)


def make_rollouts(group: Experience) -> Columns:
    """Return rollouts as a model would: the prompt's only token n, then n + i."""
    assert group.prompt is not None
    time.sleep(0.01)
    n = int(group.prompt.token_ids[0])
    is_sampled = np.tile([False, True], GROUP_SIZE)
    return {
        "token_ids": np.array([[n, n + i] for i in range(GROUP_SIZE)], np.int32).ravel(),
        "loss_mask": is_sampled,
        "generator_logprobs": np.where(is_sampled, -1.0, 0.0).astype(np.float32),
        "policy_version": np.where(is_sampled, 0, -1).astype(np.int32),
        "lengths": np.full(GROUP_SIZE, 2, np.int32),
        "finish_reason": np.zeros(GROUP_SIZE, np.int8),
    }


def compute_scores(group: Experience) -> Columns:
    """Return the sampled token of each rollout as its score."""
    return {"scores": group.columns["token_ids"][1::2].astype(np.float32)}


async def consume_groups(queue: ExperienceQueue) -> tuple[dict[str, Array], int]:
    """Return the scores of each group and the number of repeated leases; kill a shard halfway."""
    received: dict[str, Array] = {}
    repeated, is_killed = 0, False
    while len(received) < NUM_GROUPS:
        groups = await queue.lease_groups("train", max_groups=16, columns=("scores",), wait_s=1.0)
        repeated += sum(group.uid in received for group in groups)
        received.update((group.uid, group.columns["scores"].copy()) for group in groups)
        await queue.remove_groups([group.uid for group in groups], version=0)
        if not is_killed and len(received) >= NUM_GROUPS / 2:
            print(f"{len(received)} groups have arrived; killed a shard, process {kill_a_shard()}")
            is_killed = True
    return received, repeated


def kill_a_shard() -> int:
    """SIGKILL a shard's process and return its pid."""
    processes = psutil.Process().children(recursive=True)
    shard = next(p for p in processes if "ray::ShardActor" in " ".join(p.cmdline()))
    shard.kill()
    return shard.pid


async def main(folder: Path) -> int:
    """Admit prompts, start the workers, consume all groups; return 0 if all are correct."""
    shards = start_shards(
        STAGES, folder, bounds=ShardCapacity(NUM_GROUPS), config=QueueConfig(shards=2)
    )
    jobs = {"producer-0": "generate", "producer-1": "generate", "scorer-0": "reward"}
    workers = {name: WORKER.remote(shards, name) for name in jobs}
    for name, stage in jobs.items():
        workers[name].run.remote(stage, make_rollouts if stage == "generate" else compute_scores)
    queue, uids = ExperienceQueue(shards, "consumer"), [make_uid(0, i) for i in range(NUM_GROUPS)]
    prompts = [Prompt(uid, np.array([n], np.int32)) for n, uid in enumerate(uids)]
    await queue.insert_prompts(prompts, version=0)
    print(f"{NUM_GROUPS} prompts are in {len(shards)} shards, with journals in {folder}")
    received, repeated = await asyncio.wait_for(consume_groups(queue), TIMEOUT_S)
    print(f"{len(received)} groups have arrived; {repeated} were leased twice and ignored")
    wanted = {uid: np.arange(n, n + GROUP_SIZE) for n, uid in enumerate(uids)}
    wrong = [uid for uid in wanted if not np.array_equal(received[uid], wanted[uid])]
    print(f"missing or wrong: {len(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    # A Ray instance of its own; `ray.init` would connect to a running cluster.
    with start_local_ray(1, 200 << 20), tempfile.TemporaryDirectory(prefix="queue-") as path:
        code = asyncio.run(main(Path(path)))
    sys.exit(code)
