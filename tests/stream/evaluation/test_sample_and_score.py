import asyncio

import numpy as np
import pytest

from streamrl.errors import ActorError, EpisodeError, RewardError
from streamrl.messages import (
    FinishReason,
    Prompt,
    make_rollout_seeds,
    make_uid,
    rollouts_to_columns,
)
from streamrl.stream.evaluation.config import EvaluationConfig
from streamrl.stream.evaluation.sample_and_score import (
    SampledPrompt,
    evaluate_policy,
)
from tests.rollouts import make_rollout


def make_prompts(*sources):
    file_prompts = [
        Prompt(make_uid(0, i), np.array([i], np.int32), data_source=source)
        for i, source in enumerate(sources)
    ]
    return {"held_out": file_prompts}


async def generate(prompt, seeds):
    """Return a rollout per seed; the only sampled token is the seed."""
    rollouts = [make_rollout(prompt.token_ids, [seed]) for seed in seeds]
    return SampledPrompt(rollouts_to_columns(rollouts))


def make_score(table):
    """Return a score function that looks up scores by uid."""

    async def score(prompt, rollouts):
        return {"scores": np.array(table[prompt.uid][: len(rollouts["lengths"])], np.float32)}

    return score


TABLE = {
    "0:0:0": [1.0, 0.0, 0.0, 1.0],
    "0:1:0": [0.0, 0.5, 0.0, 0.5],
    "0:2:0": [1.0, 1.0, 1.0, 2.0],
}


async def evaluate(held_out, *, generate=generate, score=None, **settings):
    return await evaluate_policy(
        held_out,
        generate=generate,
        score=score or make_score(TABLE),
        config=EvaluationConfig(**settings),
    )


async def test_metrics_of_a_worked_example():
    result = await evaluate(make_prompts("easy", "hard", "easy"), samples=4)
    # 2 + 0 + 4 of 12 completions pass; 2 of 3 prompts have a passing completion; scores sum to 8.
    assert (result.num_prompts, result.samples) == (3, 4)
    assert result.pass_at_1 == pytest.approx(6 / 12)
    assert result.pass_at_k == pytest.approx(2 / 3)
    assert result.mean_at_k == pytest.approx(8 / 12)
    assert list(result.by_source) == ["easy", "hard"]
    easy, hard = result.by_source.values()
    assert (easy.num_prompts, easy.pass_at_1, easy.pass_at_k, easy.mean_at_k) == (
        2,
        0.75,
        1.0,
        0.875,
    )
    assert (hard.num_prompts, hard.pass_at_1, hard.pass_at_k, hard.mean_at_k) == (1, 0.0, 0.0, 0.25)


async def test_limit_applies_per_file_and_each_file_has_metrics():
    first, second, third = make_prompts("", "", "")["held_out"]
    for limit, used in ((None, [2, 1]), (1, [1, 1])):
        result = await evaluate({"a": [first, second], "b": [third]}, limit=limit)
        assert [part.num_prompts for part in result.by_file.values()] == used
        assert result.by_file["b"].pass_at_1 == 1.0
    assert result.to_metrics()["eval/file/a/pass_at_1"] == 0.5
    assert not any(name.startswith("eval/source/") for name in result.to_metrics())


async def test_a_prompt_that_rows_repeat_is_evaluated_once_if_asked():
    held_out = make_prompts("easy", "hard", "easy")
    first, second, _ = held_out["held_out"]
    again = Prompt("0:2:0", first.token_ids, data_source="easy")
    other_truth = Prompt("0:0:0", second.token_ids, data_source="hard", ground_truth="5")
    held_out["held_out"] = [first, second, again, other_truth]
    assert (await evaluate(held_out, samples=1)).num_prompts == 4
    result = await evaluate(held_out, samples=1, unique=True)
    assert (result.num_prompts, result.mean_at_k) == (3, pytest.approx((1 + 0 + 1) / 3))
    limited = await evaluate(held_out, samples=1, unique=True, limit=3)
    assert limited.num_prompts == 3, "the limit counts prompts, not rows"


async def test_components_have_means_without_weights_and_abstentions():
    async def score(prompt, rollouts):
        scores = np.array(TABLE[prompt.uid], np.float32)
        style = np.where(scores == 0.0, np.nan, 0.25).astype(np.float32)
        return {"scores": 2 * scores + style, "reward/right": scores, "reward/style": style}

    metrics = (await evaluate(make_prompts("easy", "hard", "easy"), score=score)).to_metrics()
    assert metrics["eval/reward/right"] == pytest.approx(8 / 12)
    assert metrics["eval/reward/style"] == 0.25
    assert metrics["eval/source/hard/reward/right"] == 0.25


async def test_maj_at_k_requires_answers_from_every_source():
    scored = make_score(TABLE)

    async def score(prompt, rollouts):
        columns = await scored(prompt, rollouts)
        if prompt.data_source not in sources_without_answers:
            has_no_answer = prompt.uid == "0:2:0"
            columns["answers"] = np.array([0] * 4 if has_no_answer else [7, 7, 0, 3], np.int64)
        return columns

    sources_without_answers: tuple[str, ...] = ()
    result = await evaluate(make_prompts("a", "b", "b"), score=score)
    # The majority answer passes by half for a, never for the first b; the second b has no answer.
    assert result.maj_at_k == pytest.approx((0.5 + 0 + 0) / 3)
    sources_without_answers = ("b",)
    result = await evaluate(make_prompts("a", "b", "b"), score=score)
    assert result.maj_at_k is None
    assert "eval/maj_at_k" not in result.to_metrics()
    assert (result.by_source["a"].maj_at_k, result.by_source["b"].maj_at_k) == (0.5, None)


async def test_seeds_depend_only_on_prompt_and_config():
    seeds_by_uid = {}

    async def record(prompt, seeds):
        seeds_by_uid[prompt.uid] = list(seeds)
        return await generate(prompt, seeds)

    await evaluate(make_prompts("", "", ""), generate=record, samples=4, seed=1)
    assert seeds_by_uid == {uid: make_rollout_seeds(1, uid, 4) for uid in TABLE}
    all_seeds = [seed for seeds in seeds_by_uid.values() for seed in seeds]
    assert len(set(all_seeds)) == 12 and all(0 <= seed < 2**31 for seed in all_seeds)
    assert make_rollout_seeds(1, "0:0:0", 2) == seeds_by_uid["0:0:0"][:2], "fewer are the first"
    assert make_rollout_seeds(0, "0:0:0", 4) != seeds_by_uid["0:0:0"]


async def test_concurrency_bounds_prompts_in_flight():
    num_running = max_running = 0

    async def count_running(prompt, seeds):
        nonlocal num_running, max_running
        num_running += 1
        max_running = max(max_running, num_running)
        await asyncio.sleep(0.001)
        num_running -= 1
        return await generate(prompt, seeds)

    async def score_ones(prompt, rollouts):
        return {"scores": np.ones(len(rollouts["lengths"]), np.float32)}

    await evaluate(make_prompts(*[""] * 100), generate=count_running, score=score_ones)
    assert max_running == EvaluationConfig.concurrency


def make_failing_score(table, failing):
    """Return a score function that fails once for each uid in `failing`."""
    score_all = make_score(table)

    async def score(prompt, rollouts):
        if prompt.uid in failing:
            failing.remove(prompt.uid)  # evaluate_policy does not retry
            raise RewardError("judge is down")
        return await score_all(prompt, rollouts)

    return score


async def test_a_prompt_with_a_failed_reward_is_excluded_and_counted():
    result = await evaluate(
        make_prompts("easy", "hard", "easy"), score=make_failing_score(TABLE, ["0:1:0"])
    )
    assert (result.num_prompts, result.num_unscored) == (2, 1)
    assert result.unscored_reason == "judge is down"
    metrics = result.to_metrics()
    assert (metrics["eval/scored"], metrics["eval/unscored"]) == (8, 4), "four samples of each"
    assert result.pass_at_1 == pytest.approx(6 / 8)
    assert list(result.by_source) == ["easy"]


async def test_an_evaluation_without_scores_raises_the_first_error():
    message = r"none of 2 prompts has a score; the first: judge is down"
    with pytest.raises(RewardError, match=message):
        await evaluate(make_prompts("", ""), score=make_failing_score(TABLE, ["0:0:0", "0:1:0"]))

    async def refuse(prompt, seeds):
        raise EpisodeError(f"{prompt.uid}: capacity refused")

    with pytest.raises(EpisodeError, match=r"none of 2 prompts .*: 0:0:0: capacity refused"):
        await evaluate(make_prompts("", ""), generate=refuse)


async def test_a_prompt_is_scored_by_the_samples_whose_environment_did_not_fail():
    async def lose_samples(prompt, seeds):
        """Lose half of the first prompt's samples."""
        if prompt.uid != "0:0:0":
            return await generate(prompt, seeds)
        sampled = await generate(prompt, seeds[:2])
        return SampledPrompt(sampled.columns, "host died")

    result = await evaluate(make_prompts("easy", "hard", "hard"), generate=lose_samples, samples=4)
    assert (result.num_prompts, result.num_unscored, result.num_unscored_samples) == (3, 0, 2)
    assert result.unscored_reason == "host died"
    metrics = result.to_metrics()
    assert (metrics["eval/scored"], metrics["eval/unscored"]) == (10, 2)
    # Scores 1, 0 are left of the first prompt; the others have 0 and 4 of 4 that pass.
    assert result.pass_at[1] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert result.pass_at[2] == pytest.approx((1 + 0 + 1) / 3)
    assert result.pass_at_k == pytest.approx((0 + 1) / 2), "of prompts with all samples"
    assert result.mean_at_k == pytest.approx((1 / 2 + 1 / 4 + 5 / 4) / 3)
    assert np.isnan(result.by_source["easy"].pass_at_k)


async def test_means_of_the_evaluated_episodes():
    async def play(prompt, seeds):
        """Return episodes of 1, 2, 3 and 4 turns with a call in each but the first."""
        sampled = await generate(prompt, seeds)
        reasons = [FinishReason.STOP, FinishReason.TURNS, FinishReason.TOKENS, FinishReason.TIMEOUT]
        return SampledPrompt(
            {
                **sampled.columns,
                "finish_reason": np.array([reason.value for reason in reasons], np.int8),
                "num_turns": np.array([1, 2, 3, 4], np.int32),
                "num_calls": np.array([0, 1, 2, 3], np.int32),
                "num_invalid_calls": np.array([0, 0, 0, 3], np.int32),
            }
        )

    row = (await evaluate(make_prompts("", "", ""), generate=play, samples=4)).to_metrics()
    assert row["eval/turns"] == 2.5
    assert row["eval/calls"] == 1.5
    assert row["eval/malformed_frac"] == 0.5
    assert row["eval/truncated_frac"] == 0.5
    assert row["eval/timeout_frac"] == 0.25
    assert "eval/turns" not in (await evaluate(make_prompts("", "", ""))).to_metrics()


async def test_a_failure_is_raised_unchanged_and_cancels_other_prompts():
    cancelled = []

    async def failing(prompt, seeds):
        if prompt.uid == "0:1:0":
            raise ActorError("generator-0 died")
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(prompt.uid)

    with pytest.raises(ActorError, match="generator-0 died"):
        await evaluate(make_prompts("", "", ""), generate=failing)
    assert sorted(cancelled) == ["0:0:0", "0:2:0"]


async def test_a_scores_column_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"uid 0:0:0: column scores has shape \(3,\)"):
        await evaluate(make_prompts(""), score=make_score({"0:0:0": [1, 1, 1]}))


@pytest.mark.parametrize(
    ("settings", "due_steps"),
    [
        ({}, [0, 10]),
        ({"every": 4}, [0, 4, 8, 10]),
        ({"every": 5, "at_end": False}, [0, 5, 10]),
        ({"every": 4, "at_start": False, "at_end": False}, [4, 8]),
        ({"at_start": False, "at_end": False}, []),
    ],
)
def test_evaluations_are_due_at_start_end_and_every_n_steps(settings, due_steps):
    config = EvaluationConfig(**settings)
    assert [step for step in range(11) if config.is_due(step, num_steps=10)] == due_steps
