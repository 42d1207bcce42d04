"""Example of tasks from reasoning-gym: rows, and the reward that judges their answers."""

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from examples.reasoning_gym.make_rows import main
from examples.reasoning_gym.reward import compute_score
from streamrl.data.config import DataConfig
from streamrl.data.prompt_file import load_data_rows, make_prompt
from streamrl.errors import ConfigError, RewardError
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.registry import build_rewards
from tests.rewards.judged import score_texts, started_rewards


def test_the_datasets_judge_scores_the_answers_to_its_rows(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    main(["chain_sum", str(path), "--size=2", "--seed=7", "--system=Add."])
    (file,) = DataConfig(train=str(path)).train_files
    prompt, other = (make_prompt(row, [0]) for row in load_data_rows(file))
    assert [message["content"] for message in prompt.messages] == [
        "Add.",
        "State the final answer to the following arithmetic problem: 60 + 93 - 16 + 19 =",
    ]
    options = {
        "path": "examples/reasoning_gym/reward.py",
        "function": "compute_score",
        "kwargs": {"pattern": "<answer>(.*?)</answer>"},
        "replicas": 1,
        "attempts": 1,
    }

    async def score() -> list[float]:
        async with started_rewards(RewardConfig("function", options=options)) as rewards:
            completions = ["well, <answer> 156 </answer>", "<answer>x</answer>", "156"]
            columns = await score_texts(rewards, prompt, completions)
            asked = {**prompt.extra_info, "question": "Another one with the same answer?"}
            for moved in (
                replace(prompt, ground_truth=other.ground_truth),
                replace(prompt, extra_info=asked),
            ):
                with pytest.raises(RewardError, match="task 0 of chain_sum is another now"):
                    await score_texts(rewards, moved, completions)
            return list(columns["scores"])

    assert asyncio.run(score()) == [1.0, 0.0, 0.0]
    assert compute_score("chain_sum", " 156\n", prompt.ground_truth, prompt.extra_info) == 1.0


def test_members_of_a_composite_are_options_in_json(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    names = ("chain_sum", "leg_counting")
    options = {"datasets": [{"name": name, "weight": 1, "config": {}} for name in names]}
    main(["composite", str(path), "--size=4", "--options", json.dumps(options)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["data_source"] for row in rows} == {*names}
    for row in rows:
        answer = row["ground_truth"]
        assert compute_score(row["data_source"], answer, answer, row["extra_info"]) == 1.0


def test_the_former_kind_of_reward_names_the_example():
    with pytest.raises(ConfigError, match=r"rewards\[0\]\.kind=reasoning_gym: .*examples/reas"):
        build_rewards([RewardConfig("reasoning_gym")])
