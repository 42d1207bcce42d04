"""Config sections `run` and `model`."""

from dataclasses import dataclass
from typing import Annotated

from streamrl.errors import ConfigError
from streamrl.files.typed_settings import at_least, check_rules
from streamrl.stream.evaluation.config import MAX_SEED

MAX_NAME_BYTES = 200


@dataclass
class RunSettings:
    """General settings of the run.

    name: name of the run directory, dir/name.
    dir: parent folder of run directories.
    seed: seed of the prompt order and of every rollout.
    steps: training steps in total, including those before a resume.
    overwrite: replace an existing run directory of the same name.
    max_restarts: restarts of each generator or scorer after it dies.
    silent_s: seconds without an answer after which a process counts as dead. Generators, scorers
        and shards are then killed and restarted; others are only reported. Set
        it above the longest load of a model, during which a process cannot answer.
    """

    name: str = "run"
    dir: str = "runs"
    seed: Annotated[int, at_least(0, MAX_SEED)] = 0
    steps: Annotated[int, at_least(1)] = 100
    overwrite: bool = False
    max_restarts: Annotated[int, at_least(0)] = 3
    silent_s: Annotated[float, at_least(1)] = 120.0

    def __post_init__(self) -> None:
        check_rules(self, "run.")
        is_plain = self.name not in ("", ".", "..") and "/" not in self.name
        if not is_plain or not self.name.isprintable() or len(self.name.encode()) > MAX_NAME_BYTES:
            raise ConfigError(
                f"run.name={self.name!r}: must be a plain folder name of at most"
                f" {MAX_NAME_BYTES} bytes"
            )


@dataclass
class ModelConfig:
    """Starting point of the policy.

    path: Hugging Face model directory.
    max_length: maximum tokens of prompt plus completion; null takes the model's own limit.
    trust_remote_code: run Python files that the directory (or the critic's) contains for its model
        or tokenizer (auto_map). Without trust_remote_code such a directory is refused.
    """

    path: str = ""
    max_length: Annotated[int | None, at_least(2)] = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_rules(self, "model.")
