"""A run with corrupted weights in a generator: recipe, folder for marks, overrides."""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.cli.run_setup.training import train
from streamrl.config.run_config import RunConfig, load_config
from streamrl.messages import Array
from streamrl.weights import WeightManifest

if TYPE_CHECKING:
    from streamrl.engines.generation.generation_engine import GenerationEngine
    from streamrl.engines.training.model_trainer import ModelTrainer

DAMAGED = 2


@dataclass(frozen=True)
class Sabotage(RealEngineFactory):
    """Real engines with faults in the weights.

    The first process of generator 0 receives a flipped byte, a bucket too few and an old version,
    and dies in a pull; its second process receives no valid version after its fourth. Version
    DAMAGED is damaged in shared memory, for all. Each process leaves a file in `marks`.
    """

    marks: Path

    async def make_generator(
        self, config: RunConfig, max_length: int, replica: int
    ) -> "GenerationEngine":
        """Make a real engine, with faults in the pulls of generator 0."""
        if replica == 0:
            life = len(list(self.marks.iterdir())) + 1
            (self.marks / str(life)).touch()
            tamper(life)
        return await super().make_generator(config, max_length, replica)

    def make_trainer(
        self, config: RunConfig, max_length: int, rank: int, role: str
    ) -> "ModelTrainer":
        """Make a real trainer, whose version DAMAGED is damaged once it is committed."""
        from streamrl.weights.transports.shared_memory import SharedMemoryWriter

        finish = SharedMemoryWriter.commit_version
        damaged = set[int]()

        def finish_damaged(outlet: SharedMemoryWriter, manifest: WeightManifest) -> None:
            if manifest.version == DAMAGED and not damaged:
                damaged.add(DAMAGED)
                outlet._committed_segments[0].view_bytes(100)[33] ^= 4
            finish(outlet, manifest)

        SharedMemoryWriter.commit_version = finish_damaged  # type: ignore[method-assign,assignment]
        return super().make_trainer(config, max_length, rank, role)


def tamper(life: int) -> None:
    """Patch the reader of weights with the faults of the generator's first or second process."""
    from streamrl.weights.transports.shared_memory import SharedMemoryReader

    honest = SharedMemoryReader.fetch_buckets
    fetched: list[Sequence[Array]] = []

    def fetch(inlet: SharedMemoryReader, manifest: WeightManifest) -> Sequence[Array]:
        buckets = list(honest(inlet, manifest))
        fetched.append([array.copy() for array in buckets])
        number = len(fetched)
        if life == 1 and number == 3:
            buckets[0] = buckets[0].copy()
            buckets[0][17] ^= 4
        if life == 2 and number > 4:
            buckets[0] = buckets[0][::-1].copy()
        if life == 1 and number == 6:
            del buckets[-1]
        if life == 1 and number == 9:
            return fetched[number - 3]
        if life == 1 and number == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return buckets

    SharedMemoryReader.fetch_buckets = fetch  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    # Actors unpickle the class by the name of its module.
    from tests.e2e.sabotage import Sabotage as Engines

    recipe, marks, *overrides = sys.argv[1:]
    train(load_config(Path(recipe), overrides), None, Engines(Path(marks)))
