"""Tasks of the package reasoning-gym as rows: made on demand from a seed, in any order.

A worker process makes them. Some datasets iterate over sets of words, so their tasks depend on the
hashes of text, which are equal in all workers. A task that takes too long can be stopped there.
"""

import importlib.metadata
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamrl.data.config import COMPOSITE, REASONING_GYM, ReasoningGymTasks
from streamrl.data.rows import IndexedRecords, format_error, wrap_data_errors
from streamrl.errors import ConfigError
from streamrl.files.optional_package import import_optional
from streamrl.files.typed_settings import suggest_nearest
from streamrl.user_code.pool.pool import BlockingWorker, WorkerError

MAX_TASK_SECONDS = 2.0
"""Longest processor time to make a task."""
TASKS_PER_CALL, CALL_TIMEOUT_S = 16, 180.0
"""Tasks that the worker makes at a time, and its deadline for them, which only a hang exceeds."""
CACHED_DATASETS = 16


def create_dataset(text: str, *, setting: str) -> Any:
    """Return the package's dataset, whose `dataset[i]` makes task i.

    text: as `ReasoningGymTasks.to_text`. setting: config section of the tasks, for errors. Raises
    ConfigError if the package is missing, or for an unknown dataset or an unusable option.
    """
    tasks = ReasoningGymTasks.from_text(text)
    label = f"{setting}.kind={REASONING_GYM}"
    import_module = partial(import_optional, setting=label, extra=REASONING_GYM)
    # Registers the datasets. After a failure, its submodules would be imported without it.
    import_module("reasoning_gym")
    factory = import_module("reasoning_gym.factory")
    if tasks.dataset not in factory.DATASETS:
        hint = suggest_nearest(tasks.dataset, factory.DATASETS, noun="dataset")
        raise ConfigError(f"{setting}.dataset={tasks.dataset}: no such dataset; {hint}")
    options = dict(tasks.options)
    try:
        if tasks.dataset == COMPOSITE:
            make_member = import_module("reasoning_gym.composite").DatasetSpec
            options["datasets"] = [make_member(**member) for member in options["datasets"]]
        return factory.create_dataset(
            tasks.dataset, **{"size": tasks.size, "seed": tasks.seed, **options}
        )
    # Checks of a dataset are assertions, but any code of the dataset may run here.
    except Exception as error:
        raise ConfigError(f"{setting}.options: {tasks.dataset}: {format_error(error)}") from error


class _TaskTimeoutError(BaseException):
    """A task took too long. No Exception, which the code of a dataset may catch."""


@contextmanager
def _limit_processor_time(seconds: float) -> Iterator[None]:
    """Raise _TaskTimeoutError after `seconds` of processor time; for the main thread.

    On a busy machine a deadline by the clock would make another row bad in each run.
    """

    def raise_timeout(*_: Any) -> None:
        raise _TaskTimeoutError

    previous = signal.signal(signal.SIGPROF, raise_timeout)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


MadeTask = tuple[str, Any, str]
"""Question, answer and dataset of a task."""


def make_task(dataset: Any, index: int, *, name: str) -> MadeTask | str:
    """Make a task; return the reason if that fails. name: dataset, unless the task has its own."""
    try:
        with _limit_processor_time(MAX_TASK_SECONDS):
            task = dataset[index]
    except _TaskTimeoutError:
        return (
            f"took more than {MAX_TASK_SECONDS:g} s to make; choose options that make smaller"
            " tasks, or another dataset"
        )
    # The package's code may raise anything.
    except Exception as error:  # noqa: BLE001
        return f"cannot be made: {type(error).__name__}: {format_error(error)}"
    return task["question"], task["answer"], task["metadata"].get("source_dataset", name)


TaskRequest = tuple[str, str, Sequence[int]]
"""Tasks, as `ReasoningGymTasks.to_text`; their config section, for errors; indices."""


def make_task_handler(_: None) -> Callable[[TaskRequest], Sequence[MadeTask | str] | str]:
    """Return the handler of the worker: a result per index, or the error of unusable tasks."""
    load_dataset = lru_cache(CACHED_DATASETS)(create_dataset)

    def handle_request(request: TaskRequest) -> Sequence[MadeTask | str] | str:
        text, setting, indices = request
        try:
            dataset = load_dataset(text, setting=setting)
        except ConfigError as error:
            return str(error)
        name = ReasoningGymTasks.from_text(text).dataset
        return [make_task(dataset, index, name=name) for index in indices]

    return handle_request


task_worker = BlockingWorker(
    f"{__name__}:{make_task_handler.__name__}", None, timeout_s=CALL_TIMEOUT_S
)
"""Worker of all tables of this process."""


class ReasoningGymTable:
    """Rows of tasks, with random access.

    path: name of the data in errors. key: config section of the tasks, for errors. Raises
    ConfigError if the package, the dataset or its options cannot be used.
    """

    def __init__(self, tasks: ReasoningGymTasks, *, path: str, key: str) -> None:
        self.path = path
        self._tasks = tasks
        self._key = key
        self._call_worker([])

    def __len__(self) -> int:
        return self._tasks.size

    @property
    def digest(self) -> str:
        """Text that identifies all tasks: a release of the package may make others."""
        version = importlib.metadata.version(REASONING_GYM)
        tasks = self._tasks
        return repr((version, tasks.to_text(), tasks.system, tasks.environment))

    def get_indices(self) -> NDArray[np.int64]:
        return np.arange(len(self))

    def get_prompt_sizes(self, prompt_key: str) -> None:
        """Return None: the length of a task is unknown before it is made."""

    def read_rows(self, rows: Sequence[int]) -> IndexedRecords:
        """Make the tasks with these indices; the record of a task that fails is its ConfigError.

        Raises DataError if the package can no longer be used.
        """
        records: IndexedRecords = []
        with wrap_data_errors(self.path):
            for start in range(0, len(rows), TASKS_PER_CALL):
                indices = [int(row) for row in rows[start : start + TASKS_PER_CALL]]
                for index, made in zip(indices, self._call_worker(indices), strict=True):
                    location = f"{self.path} task {index}"
                    record = self._to_record(made, index) if isinstance(made, tuple) else None
                    records.append((location, index, record or ConfigError(f"{location} {made}")))
        return records

    def _call_worker(self, indices: Sequence[int]) -> Sequence[Any]:
        try:
            answer = task_worker.call((self._tasks.to_text(), self._key, indices))
        except WorkerError as error:
            raise ConfigError(f"{self.path}: {error}") from None
        if isinstance(answer, str):
            raise ConfigError(answer)
        results: Sequence[Any] = answer
        return results

    def _to_record(self, made: MadeTask, index: int) -> dict[str, Any]:
        question, answer, source = made
        system = [{"role": "system", "content": self._tasks.system}] if self._tasks.system else []
        return {
            "prompt": [*system, {"role": "user", "content": question}],
            "ground_truth": answer,
            "data_source": source,
            "environment": self._tasks.environment,
            "extra_info": {REASONING_GYM: {"tasks": self._tasks.to_text(), "index": index}},
        }
