"""Two processes that share a generator, one of which is killed while it samples.

Arguments: a folder with a model and a port, and the rank to be killed. What the other one is told
goes into a file.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp

from streamrl.engines.generation import GenerationEngine, GeneratorConfig, generation_env
from streamrl.engines.generator_part import GeneratorPart
from streamrl.engines.ranks import join_ranks
from streamrl.engines.teams import Team
from streamrl.engines.vllm_engine import EngineSpec
from streamrl.errors import GenerationError
from tests.engines.tiny_qwen import MAX_LENGTH, prompt

TEAM = (0, 1)
CONFIG = GeneratorConfig(max_new_tokens=400, tensor_parallel=len(TEAM))
UNDER_WAY_S = 0.5


def main(folder: Path, victim: int) -> None:
    os.environ.update(generation_env("cpu"))
    context = mp.get_context("spawn")
    ranks = [context.Process(target=one_rank, args=(folder, rank, victim)) for rank in TEAM]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def one_rank(folder: Path, rank: int, victim: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=(folder / "port").read_text())
    join_ranks(rank=rank, world_size=len(TEAM), timeout_s=120.0)
    spec = EngineSpec(str(folder / "model"), CONFIG, 0, MAX_LENGTH, team=Team(rank, (TEAM,)))
    sign = folder / "under way"
    told = asyncio.run(lead(spec, victim, sign) if rank == 0 else follow(spec, victim, sign))
    (folder / "told").write_text(told)
    os._exit(0)


async def lead(spec: EngineSpec, victim: int, sign: Path) -> str:
    engine = await GenerationEngine.of(spec)
    await engine.use_model_dir(0)
    running = asyncio.create_task(engine.generate(prompt(5, 14, 6, 18), seeds=range(8)))
    await asyncio.sleep(UNDER_WAY_S)
    if victim == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    sign.touch()
    try:
        await running
    except GenerationError as error:
        return str(error)
    return "nothing"


async def follow(spec: EngineSpec, victim: int, sign: Path) -> str:
    part = await GeneratorPart.start(spec)
    serving = asyncio.create_task(part.serve())
    if victim == 1:
        while not sign.exists():
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        await serving
    except GenerationError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
