"""Write tasks of a dataset of reasoning-gym as JSONL, a row per task."""

import argparse
import json
from pathlib import Path

import reasoning_gym
from reasoning_gym.composite import DatasetSpec


def create_dataset(settings):
    """Return a dataset of the package; members of a composite are mappings in `settings`."""
    if "datasets" in settings:
        members = [DatasetSpec(**member) for member in settings["datasets"]]
        settings = {**settings, "datasets": members}
    return reasoning_gym.create_dataset(**settings)


def make_row(settings, index, task, system=""):
    """Return a task as a row; `extra_info` has all that makes it again."""
    messages = [{"role": "user", "content": task["question"]}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return {
        "prompt": messages,
        "ground_truth": task["answer"],
        "data_source": task["metadata"].get("source_dataset", settings["name"]),
        "extra_info": {
            "settings": json.dumps(settings),
            "index": index,
            "question": task["question"],
        },
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="such as chain_sum")
    parser.add_argument("output", type=Path, help="file to write, such as train.jsonl")
    parser.add_argument("--size", type=int, default=1000, help="number of tasks")
    parser.add_argument("--seed", type=int, default=0, help="task i is made from seed + i")
    parser.add_argument("--options", type=json.loads, default={}, help="of the dataset, as JSON")
    parser.add_argument("--system", default="", help="system message before each task")
    given = parser.parse_args(arguments)
    settings = {"name": given.dataset, "size": given.size, "seed": given.seed, **given.options}
    dataset = create_dataset(settings)
    with open(given.output, "w", encoding="utf-8") as file:
        for index in range(given.size):
            row = make_row(settings, index, dataset[index], given.system)
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
