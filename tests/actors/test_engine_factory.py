"""Stages that a scorer actor makes from a run's config, and how generators start."""

from pathlib import Path

import numpy as np
import pytest

from streamrl.actors import engine_factory
from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.config.run_config import load_config
from streamrl.data.chat_template import load_tokenizer
from streamrl.dataflow import REWARD_CALL
from streamrl.messages import (
    Experience,
    FilteredGroup,
    FinishReason,
    GroupLease,
    Prompt,
    rollouts_to_columns,
)
from tests.rollouts import make_rollout
from tests.toy import write_toy


@pytest.mark.parametrize(
    ("words", "has_gpu", "starts_empty"),
    [
        (["placement.mode=disaggregated"], True, True),
        (["placement.mode=disaggregated"], False, False),
        (["placement.mode=disaggregated", "generator.tensor_parallel=2"], False, True),
        (["placement.mode=colocated"], True, False),
    ],
)
def test_generators_take_version_0_from_the_trainer_where_reading_it_is_slow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    has_gpu: bool,
    starts_empty: bool,
):
    monkeypatch.setattr(engine_factory, "has_local_gpu", lambda: has_gpu)
    config = load_config(write_toy(tmp_path) / "recipe.yaml", words, skips_dry_run=True)
    assert engine_factory._make_engine_spec(config, 64, 0).starts_empty is starts_empty


async def test_the_filter_of_a_run_judges_a_group_by_its_included_rollouts(tmp_path: Path):
    (tmp_path / "episodes.py").write_text("class Episodes: ...")
    words = ["filter.kind=equal_rewards", f"environment.path={tmp_path}/episodes.py"]
    config = load_config(write_toy(tmp_path) / "recipe.yaml", words, skips_dry_run=True)
    tokenizer = load_tokenizer(config.model.path)
    ends = {"7": FinishReason.STOP, "8": FinishReason.STOP, "9": FinishReason.TIMEOUT}
    rollouts = [
        make_rollout([4], tokenizer(text).input_ids, finish_reason=reason)
        for text, reason in ends.items()
    ]
    prompt = Prompt("0:1:0", np.array([4], np.int32), ground_truth="9")
    lease = GroupLease(token=1, uid=prompt.uid, stage="reward", attempt=1, expires_at=9.0)
    group = Experience(lease, 0, prompt=prompt, columns=rollouts_to_columns(rollouts))
    scorer = await RealEngineFactory().make_reward_scorer(config, REWARD_CALL.role)
    (verdict,) = await scorer.functions[REWARD_CALL.stage]([group])
    await scorer.rewards.close()
    assert isinstance(verdict, FilteredGroup), "the only right answer came too late"
