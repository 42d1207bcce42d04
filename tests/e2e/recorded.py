"""Runs one after the other in one process: recipe, folder for notes, overrides of each as JSON.

Every rank of the policy notes each rollout that it trains.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.buffer.micro_batch_schedule import RolloutIndex
from streamrl.cli.run_setup.training import train
from streamrl.config.run_config import RunConfig, load_config
from streamrl.dataflow import POLICY
from streamrl.messages import Columns, columns_to_rollouts
from tests.e2e.launched import Launched, rows

if TYPE_CHECKING:
    from streamrl.engines.training.model_trainer import ModelTrainer

TrainedRollouts = dict[tuple[int, str, int], list[int]]
"""Tokens of a rollout, prompt included, by version, uid and index in the group."""


@dataclass(frozen=True)
class Recording(RealEngineFactory):
    """Real engines. Trainers note rollouts in `notes`, a file per run and rank."""

    notes: Path

    def make_trainer(
        self, config: RunConfig, max_length: int, rank: int, role: str
    ) -> "ModelTrainer":
        """Make a real trainer that notes the policy's rollouts before training them."""
        trainer = super().make_trainer(config, max_length, rank, role)
        if role != POLICY:
            return trainer
        path, train = self.notes / f"{config.run.name}.{rank}.jsonl", trainer.train_micro_batch

        def note_and_train(
            groups: Mapping[str, Columns],
            picks: Sequence[RolloutIndex],
            version: int,
            *,
            epoch: int,
        ) -> dict[str, float]:
            with path.open("a") as file:
                for uid, index in picks:
                    tokens = columns_to_rollouts(groups[uid])[index].token_ids.tolist()
                    file.write(json.dumps([version, uid, index, tokens]) + "\n")
            return train(groups, picks, version, epoch=epoch)

        trainer.train_micro_batch = note_and_train  # type: ignore[method-assign,assignment]
        return trainer


def trained(notes: Path, name: str) -> TrainedRollouts:
    """Read the rollouts that all ranks of a run trained; repeated ones have to be equal."""
    rollouts: TrainedRollouts = {}
    for path in sorted(notes.glob(f"{name}.*.jsonl")):
        for version, uid, index, tokens in map(json.loads, path.read_text().splitlines()):
            assert rollouts.setdefault((version, uid, index), tokens) == tokens
    return rollouts


@dataclass(frozen=True)
class Played:
    """A run that has ended: the rows of its metrics, and what it trained."""

    rows: list[dict[str, Any]]
    trained: TrainedRollouts


def play(folder: Path, runs: Mapping[str, Sequence[str]]) -> dict[str, Played]:
    """Run the recipe of the toy in `folder` with the overrides of each name, in one process."""
    words = [str(folder / "recipe.yaml"), str(folder)]
    for name, overrides in runs.items():
        words.append(json.dumps([*overrides, f"run.dir={folder}/runs", f"run.name={name}"]))
    Launched(words, folder, module="tests.e2e.recorded").finish(1200.0)
    return {name: Played(rows(folder / "runs" / name), trained(folder, name)) for name in runs}


if __name__ == "__main__":
    # Actors unpickle the class by the name of its module.
    from tests.e2e.recorded import Recording as Engines

    recipe, notes, *runs = sys.argv[1:]
    for run in runs:
        train(load_config(Path(recipe), json.loads(run)), None, Engines(Path(notes)))
