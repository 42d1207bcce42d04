"""Runs one after the other in one process: recipe, folder for what was trained, overrides as JSON.

Every rank of the policy writes down each rollout as it trains it.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.buffer.assembly.packing import RolloutIndex
from streamrl.cli.train import train
from streamrl.config.run_config import RunConfig, load_config
from streamrl.dataflow import POLICY
from streamrl.messages import Columns, columns_to_rollouts

if TYPE_CHECKING:
    from streamrl.engines.training.trainer import ModelTrainer

Trained = dict[tuple[int, str, int], list[int]]
"""By version of the step, uid and index in the group: the tokens of a rollout, prompt included."""


@dataclass(frozen=True)
class Recording(RealEngineFactory):
    """Real engines. Trainers note what they train in `notes`, a file per run and rank."""

    notes: Path

    def make_trainer(
        self, config: RunConfig, max_length: int, rank: int, role: str
    ) -> "ModelTrainer":
        """A real one; what a policy's trains is noted before it is trained."""
        found = super().make_trainer(config, max_length, rank, role)
        if role != POLICY:
            return found
        path, made = self.notes / f"{config.run.name}.{rank}.jsonl", found.train_micro_batch

        def noted(
            groups: Mapping[str, Columns], picks: Sequence[RolloutIndex], version: int
        ) -> dict[str, float]:
            with path.open("a") as file:
                for uid, index in picks:
                    tokens = columns_to_rollouts(groups[uid])[index].token_ids.tolist()
                    file.write(json.dumps([version, uid, index, tokens]) + "\n")
            return made(groups, picks, version)

        found.train_micro_batch = noted  # type: ignore[method-assign,assignment]
        return found


def trained(notes: Path, name: str) -> Trained:
    """What all ranks of a run have trained; one that was trained again has to be the same."""
    found: Trained = {}
    for path in sorted(notes.glob(f"{name}.*.jsonl")):
        for version, uid, index, tokens in map(json.loads, path.read_text().splitlines()):
            assert found.setdefault((version, uid, index), tokens) == tokens
    return found


if __name__ == "__main__":
    # Actors know the class by the name of its module.
    from tests.e2e.recorded import Recording as Engines

    recipe, notes, *runs = sys.argv[1:]
    for run in runs:
        train(load_config(Path(recipe), json.loads(run)), None, Engines(Path(notes)))
