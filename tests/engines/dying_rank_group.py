"""Two ranks of a generator split by tensor parallelism; one rank is killed during sampling."""

import asyncio
import os
import signal
from pathlib import Path

from streamrl.distributed.process_group import join_process_group
from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm.engine import EngineSpec
from streamrl.engines.vllm.follower_rank import FollowerRank
from streamrl.engines.vllm.rank_groups import RankGroup
from streamrl.errors import GenerationError
from tests.engines.tiny_qwen import MAX_LENGTH, prompt

RANKS = (0, 1)
CONFIG = GeneratorConfig(max_new_tokens=400, tensor_parallel=len(RANKS))
SAMPLING_S = 0.5


def run_dying_rank(rank: int, path: str, port: int, victim: int, ready_file: Path) -> str:
    """Return the survivor's error; the file `ready_file` appears once the ranks sample."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    join_process_group(rank=rank, world_size=len(RANKS), timeout_s=120.0)
    spec = EngineSpec(path, CONFIG, MAX_LENGTH, rank_group=RankGroup(rank, (RANKS,)))
    return asyncio.run(
        lead(spec, victim, ready_file) if rank == 0 else follow(spec, victim, ready_file)
    )


async def lead(spec: EngineSpec, victim: int, ready_file: Path) -> str:
    engine = await GenerationEngine.start(spec)
    await engine.use_model_dir(0)
    running = asyncio.create_task(engine.generate(prompt(5, 14, 6, 18), seeds=range(8)))
    await asyncio.sleep(SAMPLING_S)
    if victim == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    ready_file.touch()
    try:
        await running
    except GenerationError as error:
        return str(error)
    return "nothing"


async def follow(spec: EngineSpec, victim: int, ready_file: Path) -> str:
    follower = await FollowerRank.start(spec)
    serving = asyncio.create_task(follower.wait_until_closed())
    if victim == 1:
        while not ready_file.exists():
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        await serving
    except GenerationError as error:
        return str(error)
    return "nothing"
