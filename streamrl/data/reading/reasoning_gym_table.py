"""Tasks of the package reasoning-gym as rows: made on demand from a seed, in any order."""

import importlib.metadata
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import MISSING

from streamrl.data.reading.formats import format_error
from streamrl.data.reading.indexed_table import IndexedRecords, wrap_data_errors
from streamrl.errors import ConfigError
from streamrl.files.optional_package import import_optional
from streamrl.files.typed_settings import suggest_nearest

REASONING_GYM = "reasoning_gym"
"""Kind of data, extra, module, and key of `extra_info` under which a row names its task."""
COMPOSITE = "composite"
"""Dataset that mixes others by weight."""
MAX_TASK_SECONDS = 2.0
"""Longest processor time of a task: the threads of the coordinator make the rows."""
NUM_PROBED_TASKS = 8
NONSENSE = "zzz"
"""Answer that is wrong in every dataset."""


@dataclass(frozen=True)
class ReasoningGymTasks:
    """Tasks of a dataset of reasoning-gym. Task i is made from seed + i alone.

    dataset: name of the dataset, such as chain_sum.
    size: number of tasks.
    seed: seed of the first task. The tasks of two seeds overlap unless they are `size` apart.
    options: settings of the dataset. Those of `composite` are `datasets`, a list of mappings with
        name, weight and config.
    system: system message before each task; empty: none.
    """

    dataset: str = MISSING
    size: int = MISSING
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    system: str = ""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size={self.size}: must be 1 or more")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}: must be 0 or more")
        for name in ("seed", "size"):
            if name in self.options:
                raise ConfigError(f"options.{name}: give {name} beside dataset, not as an option")
        if self.dataset == COMPOSITE:
            for member in self.options.get("datasets") or [None]:
                if not isinstance(member, dict) or {*member} != {"name", "weight", "config"}:
                    raise ConfigError(
                        "options.datasets: must be a list of mappings with name, weight and config"
                    )

    @property
    def seed_ranges(self) -> list[tuple[str, range]]:
        """Seeds of all tasks by dataset; a member of a composite has seeds of its own."""
        if self.dataset != COMPOSITE:
            return [(self.dataset, range(self.seed, self.seed + self.size))]
        members = enumerate(self.options["datasets"], start=self.seed + 1)
        firsts = [(member["name"], member["config"].get("seed", seed)) for seed, member in members]
        return [(name, range(first, first + self.size)) for name, first in firsts]

    def to_text(self) -> str:
        """Return all that a task depends on besides its index, as JSON; see `from_text`."""
        facts = (self.dataset, self.size, self.seed, self.options)
        return json.dumps(facts)

    @classmethod
    def from_text(cls, text: str) -> "ReasoningGymTasks":
        return cls(*json.loads(text))


def create_dataset(tasks: ReasoningGymTasks, *, setting: str) -> Any:
    """Return the package's dataset, whose `dataset[i]` makes task i.

    setting: config section of the tasks, for errors. Raises ConfigError if the package is missing,
    or for an unknown dataset or an unusable option.
    """
    label = f"{setting}.kind={REASONING_GYM}"
    factory = import_optional("reasoning_gym.factory", setting=label, extra=REASONING_GYM)
    # Importing the package registers its datasets.
    if tasks.dataset not in factory.DATASETS:
        hint = suggest_nearest(tasks.dataset, factory.DATASETS, noun="dataset")
        raise ConfigError(f"{setting}.dataset={tasks.dataset}: no such dataset; {hint}")
    options = dict(tasks.options)
    try:
        if tasks.dataset == COMPOSITE:
            from reasoning_gym.composite import DatasetSpec

            options["datasets"] = [DatasetSpec(**member) for member in options["datasets"]]
        return factory.create_dataset(
            tasks.dataset, **{"size": tasks.size, "seed": tasks.seed, **options}
        )
    # Checks of a dataset are assertions, but any code of the dataset may run here.
    except Exception as error:
        raise ConfigError(f"{setting}.options: {tasks.dataset}: {format_error(error)}") from error


class ReasoningGymTable:
    """Rows of tasks, with random access. Methods may run in several threads.

    path: name of the data in errors. key: config section of the tasks, for errors. Raises
    ConfigError if the package, the dataset or its options cannot be used.
    """

    def __init__(self, tasks: ReasoningGymTasks, *, path: str, key: str) -> None:
        self.path = path
        self._tasks = tasks
        self._key = key
        self._lock = threading.Lock()
        self._dataset: Any = None
        self._load_dataset()

    def __len__(self) -> int:
        return self._tasks.size

    @property
    def digest(self) -> str:
        """Text that identifies all tasks: a release of the package may make others."""
        version = importlib.metadata.version(REASONING_GYM)
        return f"{version} {self._tasks.system} {self._tasks.to_text()}"

    def get_indices(self) -> NDArray[np.int64]:
        return np.arange(len(self))

    def get_prompt_sizes(self, prompt_key: str) -> None:
        """Return None: the length of a task is unknown before it is made."""

    def read_rows(self, rows: Sequence[int]) -> IndexedRecords:
        """Make the tasks with these indices; the record of a task that fails is its ConfigError.

        Raises DataError if the package can no longer be used.
        """
        with self._lock, wrap_data_errors(self.path):
            dataset = self._load_dataset()
            return [self._make_record(dataset, int(index)) for index in rows]

    def _load_dataset(self) -> Any:
        if self._dataset is None:
            self._dataset = create_dataset(self._tasks, setting=self._key)
        return self._dataset

    def _make_record(self, dataset: Any, index: int) -> tuple[str, int, Any]:
        location = f"{self.path} task {index}"
        # Processor time: on a busy machine a task must not become a bad row.
        started = time.thread_time()
        try:
            task = dataset[index]
        except Exception as error:  # noqa: BLE001 - the package's code may raise anything
            reason = f"cannot be made: {type(error).__name__}: {format_error(error)}"
            return location, index, ConfigError(f"{location}: {reason}")
        seconds = time.thread_time() - started
        if seconds > MAX_TASK_SECONDS:
            limit = f"took {seconds:.1f} s to make, more than {MAX_TASK_SECONDS:g} s"
            hint = "choose options that make smaller tasks, or another dataset"
            return location, index, ConfigError(f"{location}: {limit}; {hint}")
        return location, index, self._to_record(task, index)

    def _to_record(self, task: dict[str, Any], index: int) -> dict[str, Any]:
        system = [{"role": "system", "content": self._tasks.system}] if self._tasks.system else []
        return {
            "prompt": [*system, {"role": "user", "content": task["question"]}],
            "ground_truth": task["answer"],
            "data_source": task["metadata"].get("source_dataset", self._tasks.dataset),
            "extra_info": {REASONING_GYM: {"tasks": self._tasks.to_text(), "index": index}},
        }

    def list_notes(self) -> list[str]:
        """Return a note if the dataset's judge gives full marks to nonsense."""
        sources = [*self._list_fooled_datasets()]
        return [
            f"{self.path}: the judge of {name} gives {NONSENSE!r} a score of 1 or more in"
            f" {sources.count(name)} of the first {NUM_PROBED_TASKS} tasks: a policy can earn it"
            " without solving them"
            for name in dict.fromkeys(sources)
        ]

    def _list_fooled_datasets(self) -> Iterator[str]:
        """Yield the dataset of each of the first tasks whose judge takes nonsense for right."""
        dataset = self._load_dataset()
        for index in range(min(NUM_PROBED_TASKS, len(self))):
            try:
                task = dataset[index]
                is_fooled = dataset.score_answer(NONSENSE, task) >= 1
            # Some judges raise on what they cannot parse.
            except Exception:  # noqa: BLE001
                continue
            if is_fooled:
                yield task["metadata"].get("source_dataset", self._tasks.dataset)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None, "_dataset": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())
