"""Backends and numbers of ranks that trainers are tested with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.engines.trainer_config import TrainerConfig


@dataclass(frozen=True)
class Layout:
    """A backend on a number of ranks."""

    backend: str
    zero_stage: int
    world_size: int
    tensor_parallel: int = 1
    sequence_parallel: int = 1

    @property
    def label(self) -> str:
        # Backend torch shards nothing below stage 3.
        stage = "" if self.backend == "torch" and self.zero_stage < 3 else str(self.zero_stage)
        tensor = f"x{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        sequence = f"s{self.sequence_parallel}" if self.sequence_parallel > 1 else ""
        return f"{self.backend}{stage}-{self.num_shares}{tensor}{sequence}"

    @property
    def num_shares(self) -> int:
        return self.world_size // self.tensor_parallel // self.sequence_parallel

    def make_config(self, **settings: Any) -> TrainerConfig:
        """Make the configuration of a trainer in float32."""
        return TrainerConfig(
            backend=self.backend,
            zero_stage=self.zero_stage,
            world_size=self.world_size,
            tensor_parallel=self.tensor_parallel,
            sequence_parallel=self.sequence_parallel,
            **{"dtype": "float32", **settings},
        )

    def select_shares(self, cases: Sequence[Any]) -> Sequence[Any]:
        """Return the results of a single rank of each data-parallel share."""
        return cases[:: self.tensor_parallel * self.sequence_parallel]


LAYOUTS = [
    Layout(backend, stage, world_size)
    for world_size in (1, 2)
    for backend, stage in [("torch", 1), *(("deepspeed", stage) for stage in range(1, 4))]
]
LAYOUTS += [Layout("torch", 3, 2), Layout("torch", 1, 2, tensor_parallel=2)]
LAYOUTS += [Layout("torch", 3, 2, sequence_parallel=2)]
CUTS = (1, 2, 5)
ONE, TWO = Layout("torch", 1, 1), Layout("torch", 1, 2)
SHARDED, SPLIT = Layout("deepspeed", 2, 2), Layout("torch", 1, 2, tensor_parallel=2)
GATHERED = Layout("deepspeed", 3, 2)
PAIRS = [layout for layout in LAYOUTS if layout.world_size == 2]
SAVED = [layout for layout in LAYOUTS if layout.world_size == 2 or layout.zero_stage == 2]
SEVERAL_ON = [layout for layout in LAYOUTS if layout.backend == "torch" or layout.zero_stage == 3]
