"""Real engines on devices that are shares of a core, for placements of more devices than cores."""

import fcntl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, partialmethod
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.config.role_counts import count_actors
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import GENERATE_CALL
from streamrl.placement.pools import lay_out_slots

if TYPE_CHECKING:
    from streamrl.engines.generation.generation_engine import GenerationEngine
    from streamrl.engines.training.model_trainer import ModelTrainer

TRAINER_CALLS = (
    *("plan_step", "precompute_logprobs", "train_micro_batch", "update"),
    *("compute_columns", "compute_token_logprobs"),
)


@dataclass(frozen=True)
class DeviceClock:
    """A device that computes as fast as a `share` of a core; processes share it by its file.

    free_s: when it has computed all calls so far, in seconds of the machine's clock. busy_s: sum of
    their seconds. late_s: by how much they ended later than on a device that nothing slows down;
    waiting for other ranks counts too.
    """

    FORMAT = struct.Struct("3d")

    path: Path
    share: float

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call, and return when the device would: after those before it, c / share seconds.

        c: the CPU time of the call, which computes on the calling thread.
        """
        start_s, start_cpu_s = time.monotonic(), time.thread_time()
        result = call(*args, **kwargs)
        call_s = (time.thread_time() - start_cpu_s) / self.share
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            free_s, busy_s, late_s = self.FORMAT.unpack(file.read())
            free_s = max(start_s, free_s) + call_s
            left_s = free_s - time.monotonic()
            file.seek(0)
            file.write(self.FORMAT.pack(free_s, busy_s + call_s, late_s + max(0.0, -left_s)))
        time.sleep(max(0.0, left_s))
        return result


@dataclass(frozen=True)
class CoreShares(RealEngineFactory):
    """Engines of one thread each, on devices of a `share` of a core; their files are in `folder`.

    Reference and reward models are not slowed down.
    """

    share: float
    folder: Path

    def make_devices(self, num_devices: int) -> None:
        """Write the files of idle devices."""
        self.folder.mkdir(exist_ok=True)
        for device in range(num_devices):
            self._find_path(device).write_bytes(DeviceClock.FORMAT.pack(0, 0, 0))

    def read_late_fraction(self) -> float:
        """Return by which part of their busy time calls were late, of the device with the most."""
        clocks = [DeviceClock.FORMAT.unpack(p.read_bytes()) for p in self.folder.iterdir()]
        return max(late_s / busy_s for _, busy_s, late_s in clocks if busy_s)

    async def make_generator(
        self, config: RunConfig, max_length: int, replica: int
    ) -> "GenerationEngine":
        generator = await super().make_generator(config, max_length, replica)
        engine: Any = import_module("vllm.v1.engine.llm_engine").LLMEngine
        clock = self._find_clock(config, GENERATE_CALL.role, replica)
        engine.step = partialmethod(partial(clock.run, engine.step))
        return generator

    def make_trainer(
        self, config: RunConfig, max_length: int, rank: int, role: str
    ) -> "ModelTrainer":
        trainer = super().make_trainer(config, max_length, rank, role)
        clock = self._find_clock(config, role, rank)
        for name in TRAINER_CALLS:
            setattr(trainer, name, partial(clock.run, getattr(trainer, name)))
        return trainer

    def _find_clock(self, config: RunConfig, role: str, actor: int) -> DeviceClock:
        counts = {name: count for name, (_, count) in count_actors(config).items()}
        slots = lay_out_slots(config.placement.shared_pools, counts).slots
        return DeviceClock(self._find_path(slots[role][actor]), self.share)

    def _find_path(self, device: int) -> Path:
        return self.folder / str(device)
