"""Stop strings and stop token ids end a completion and belong to the rollout."""

from pathlib import Path

import pytest

from streamrl.engines.generator_config import GeneratorConfig
from streamrl.messages import FinishReason, Rollout, make_empty_rollout
from tests.engines.flight import SHORT, start_engine
from tests.engines.tiny_qwen import endless_model, prompt, save, weights_of, worst_error

pytestmark = [pytest.mark.xdist_group("engines"), pytest.mark.usefixtures("no_engine")]

#: The end of a token, a space, and the start of the next; and a token.
TEXT, TOKEN_ID = "1 t3", 44


def list_completion_ids(rollout: Rollout) -> list[int]:
    """Return the completion's token ids."""
    return list(rollout.completion_ids.tolist())


def is_stopped(token_ids: list[int]) -> bool:
    """Return whether a completion contains a stop string or token."""
    return TOKEN_ID in token_ids or TEXT in " ".join(f"t{i}" for i in token_ids)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_rollout_ends_with_the_token_that_completes_a_stop_string(tmp_path: Path):
    model = endless_model(seed=1)
    config = GeneratorConfig(max_new_tokens=100, stop=[TEXT], stop_token_ids=[TOKEN_ID])
    async with start_engine(save(model, tmp_path), config) as engine:
        await engine.load_weights(weights_of(model), 0)
        rollouts = await engine.generate(SHORT, seeds=range(32))
        stopped = [r for r in rollouts if r.finish_reason is FinishReason.STOP]
        by_text = [r for r in stopped if list_completion_ids(r)[-1] != TOKEN_ID]
        assert len(by_text) > 3 and len(stopped) - len(by_text) > 3
        for rollout in stopped:
            assert is_stopped(list_completion_ids(rollout)) and not is_stopped(
                list_completion_ids(rollout)[:-1]
            )
        for rollout in rollouts:
            assert rollout in stopped or not is_stopped(list_completion_ids(rollout))
            assert rollout.loss_mask[len(SHORT) :].all()
        assert worst_error(rollouts, {0: model}) < 1e-4
        # A rollout that was interrupted within the stop string ends all the same.
        cut = make_empty_rollout(prompt(*SHORT, 21))
        (rollout,) = await engine.generate(SHORT, seeds=[3], partial_rollouts=[cut])
        assert rollout.token_ids[len(SHORT)] == 21
        assert not is_stopped(list_completion_ids(rollout)[:-1])


def test_a_stop_string_is_found_across_a_resume_and_between_bytes(tmp_path: Path):
    from streamrl.engines.vllm.engine import StopConditions  # loads vLLM

    folder = save(endless_model(seed=1), tmp_path)
    conditions = StopConditions(folder, GeneratorConfig(stop=["1 t3 t4", "t9"]))
    for sampled, new, expected in (
        ([], [21, 3, 4], ["", "", "1 t3 t4"]),
        ([21], [3, 4], ["", "1 t3 t4"]),
        ([5] * 50 + [21, 3], [4], ["1 t3 t4"]),
        ([21, 3], [5, 9], ["", "t9"]),
        ([], [29], [""]),
    ):
        detokenizer = conditions.make_detokenizer(sampled)
        assert [detokenizer.update([token], False) or "" for token in new] == expected
        assert detokenizer.num_output_tokens() == len(new)
    assert StopConditions(folder, GeneratorConfig()).make_detokenizer([]) is None
