"""Memory of real trainer ranks in two processes, each alone and both together.

Processes report memory relative to that before the model exists.
"""

import gc
import os
from collections.abc import Sequence

from streamrl.algorithms import AlgorithmConfig
from streamrl.engines.memory.peak_memory import (
    PROC_STATUS,
    PeakMemoryTracker,
    release_freed_memory,
    release_large_blocks_eagerly,
)
from tests.engines.tiny_groups import make_groups
from tests.engines.trainer_layouts import Layout

MB = 1 << 20
WORLD = 2
UPDATES = 2
MICRO_BATCHES = 2
#: Maximum tokens of a micro-batch: four rollouts.
TOKENS = 64


SINGLE_RANK_CASES = (Layout("torch", 1, 1), Layout("deepspeed", 1, 1))
# DeepSpeed comes last: it leaves patched functions behind that do not support FSDP.
TWO_RANK_CASES = (
    Layout("torch", 1, WORLD, tensor_parallel=WORLD),
    Layout("torch", 3, WORLD),
    Layout("deepspeed", 2, WORLD),
    Layout("deepspeed", 3, WORLD),
)
CASES = (*SINGLE_RANK_CASES, *TWO_RANK_CASES)


def run_rank(
    rank: int, model_path: str, small_path: str, ports: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Return a rank's measurements by case, after a warm-up with a small model."""
    from streamrl.engines.training.training_backend import import_deepspeed

    release_large_blocks_eagerly()  # as a worker with a memory budget does
    import_deepspeed()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    results = {}
    split, sharded, *other_cases = TWO_RANK_CASES
    free = list(ports)
    # A forked process touches new memory when it runs code for the first time.
    measure_training(SINGLE_RANK_CASES[0], rank, small_path)
    for case in (split, sharded, SINGLE_RANK_CASES[rank], *other_cases):
        if case.world_size > 1:
            os.environ["MASTER_PORT"] = str(free.pop())
        results[case.label] = measure_training(case, rank, model_path)
    return results


def measure_training(case: Layout, rank: int, model_path: str) -> dict[str, float]:
    """Return the peak of some steps and the bytes freed by offloading, MB."""
    from streamrl.engines.training.model_trainer import ModelTrainer
    from streamrl.engines.training.tasks import PolicyTask

    algorithm, groups = AlgorithmConfig(), make_groups()
    settings = algorithm.to_settings(max_length=8, reward_weights={})
    task = PolicyTask(model_path, algorithm.spec, settings, 1.0)
    picks = [("0:0:0", i) for i in range(4)]
    gc.collect()
    release_freed_memory()
    before = measure_resident_mb()
    trainer = ModelTrainer(task, config=case.make_config(), rank=rank if case.world_size > 1 else 0)
    memory = PeakMemoryTracker()
    for _ in range(UPDATES):
        for _ in range(MICRO_BATCHES):
            trainer.train_micro_batch(groups, picks)
        trainer.update(4.0)
    memory.record_phase("train")
    release_freed_memory()
    resident = measure_resident_mb()
    trainer.offload_optimizer()
    offloaded = resident - measure_resident_mb()
    trainer.close()
    return {"peak": memory.drain_peaks()["train"] - before, "offloaded": offloaded}


def measure_resident_mb() -> float:
    lines = PROC_STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024
