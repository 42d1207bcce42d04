"""Reward of rows that make_rows.py wrote: the judge of the dataset scores the answer."""

import copy
import json
import re
from functools import lru_cache

import reasoning_gym
from reasoning_gym.composite import DatasetSpec


def create_dataset(settings):
    """Return a dataset of the package; members of a composite are mappings in `settings`."""
    if "datasets" in settings:
        members = [DatasetSpec(**member) for member in settings["datasets"]]
        settings = {**settings, "datasets": members}
    return reasoning_gym.create_dataset(**settings)


@lru_cache(16)
def load_dataset(settings):
    return create_dataset(json.loads(settings))


@lru_cache(64)
def make_task(settings, index):
    return load_dataset(settings)[index]


def compute_score(data_source, solution_str, ground_truth, extra_info, pattern=r"(?s)\A(.*)\Z"):
    """Score the first group of the last match of `pattern`; 0 without a match.

    A judge that raises on the answer, but not on the task's own, cannot read it: the score is 0.
    """
    settings, index = extra_info["settings"], extra_info["index"]
    task = make_task(settings, index)
    if (task["question"], task["answer"]) != (extra_info.get("question"), ground_truth):
        raise ValueError(
            f"task {index} of {data_source} is another now; write the rows again, with this"
            " release of reasoning-gym and PYTHONHASHSEED=0"
        )
    answers = re.findall(pattern, solution_str.strip())
    if not answers:
        return 0.0
    judge = load_dataset(settings).score_answer
    try:
        return judge(answers[-1].strip(), copy.deepcopy(task))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the package may raise anything
        judge(ground_truth, copy.deepcopy(task))
        return 0.0
