import asyncio
import json
import math
import shutil
import threading
from math import nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from streamrl.config.preflight import PROCESS_GIB, list_resource_demands, prepare_run
from streamrl.config.run_config import load_config
from streamrl.data.chat_template import load_tokenizer
from streamrl.engines.training.model_rank import ModelRank
from streamrl.errors import ConfigError, RewardError, RewardTimeoutError
from streamrl.messages import Prompt
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.kinds.model import MicroBatcher, plan_batches
from streamrl.rewards.registry import build_rewards
from streamrl.user_code.reward_result import RewardOutcome
from tests.rewards.judged import EPISODE
from tests.rewards.tiny_classifier import write_classifier
from tests.toy import SYMBOLS, write_model, write_toy

pytestmark = pytest.mark.usefixtures("process_group_of_models")

PROMPT = Prompt("0:4:0", np.array([1], np.int32), messages=({"role": "user", "content": "2+3"},))
TEXTS = ["5", "1234567890", "=", "55-5 + 0", "99999999999999999999", "0"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_classifier(tmp_path_factory.mktemp("reward") / "model")


@pytest.fixture
def started(start_rewards):
    """Start rewards with a single model."""

    async def start(path, *, timeout_s=30.0, **options):
        config = RewardConfig("model", options={"path": str(path), **options})
        return await start_rewards(config, timeout_s=timeout_s)

    return start


async def judged(rewards, texts=TEXTS, prompt=PROMPT):
    return (await rewards.judge_texts(prompt, texts)).components["model"]


async def scores(rewards, texts=TEXTS, prompt=PROMPT):
    return [result.score for result in await judged(rewards, texts, prompt)]


def copy_with_config(path, to, **settings):
    """Copy the model's directory with a changed config."""
    shutil.copytree(path, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **settings}))
    return to


def copy_with_weights(path, to, change):
    """Copy the model's directory with weights modified by `change`."""
    copy_with_config(path, to)
    weights = load_file(to / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def copy_without_template(path, tmp_path):
    plain = copy_with_config(path, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    return plain


def compute_reference_logit(path, text):
    """Return the model's logit of a single text: a token per symbol, <pad> for unknown symbols."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    ids = [SYMBOLS.index(symbol) if symbol in SYMBOLS else 0 for symbol in text]
    with torch.no_grad():
        return pytest.approx(model(torch.tensor([ids])).logits.item(), abs=1e-5)


async def test_the_score_equals_transformers_logit_of_the_templated_conversation(path, started):
    results = await scores(await started(path))
    # The toy's chat template: all contents, then "=".
    assert results == [compute_reference_logit(path, f"2+3{text}=") for text in TEXTS]
    assert max(results) - min(results) > 0.1


async def test_without_a_template_the_completion_follows_the_prompt(path, tmp_path, started):
    chat = ({"role": "system", "content": "9"}, {"role": "user", "content": "2+3"})
    prompt = Prompt("0:0:0", PROMPT.token_ids, messages=chat)
    results = await scores(await started(copy_without_template(path, tmp_path)), prompt=prompt)
    assert results == [compute_reference_logit(path, f"9\n2+3{text}") for text in TEXTS]


async def test_a_text_that_spells_a_control_token_is_scored_as_text(path, tmp_path, started):
    text, tokenizer = "2<pad>3", load_tokenizer(str(path))
    assert tokenizer("<pad>")["input_ids"] == [0]
    for model, end in ((path, "="), (copy_without_template(path, tmp_path), "")):
        results = await scores(await started(model), [text])
        assert results == [compute_reference_logit(path, f"2+3{text}{end}")]


async def test_an_episode_is_rendered_by_the_reward_models_own_template(
    path, tmp_path, start_rewards
):
    own = copy_with_config(path, tmp_path / "own")
    (own / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ {'user': '=', 'assistant': '+', 'tool': '-'}[m.role] }}"
        "{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.arguments.first }} {{ call.function.arguments.second }}"
        "{% endfor %}{% endfor %}"
    )
    texts = {"conversation": "=2+3+2 3-5\nuser: 10+5", "last_turn": "=2+3+5"}
    for part, text in texts.items():
        config = RewardConfig("model", of=part, options={"path": str(own)})
        rewards = await start_rewards(config, timeout_s=30.0)
        result = await rewards.judge_group(PROMPT, [EPISODE])
        assert result.totals[0] == compute_reference_logit(path, text)


async def test_each_step_has_the_score_of_the_text_up_to_its_end(path, started):
    prefixes = ["1+", "1+2+", "1+2+5"]
    expected = await scores(await started(path), prefixes)
    (steps, single) = await judged(await started(path, step_end="+"), [prefixes[-1], "7"])
    assert steps.score == pytest.approx(sum(expected), abs=1e-5)
    assert [span[:2] for span in steps.span_scores] == [(0, 2), (2, 4), (4, 5)]
    assert [span[2] for span in steps.span_scores] == pytest.approx(expected, abs=1e-5)
    assert not single.has_places
    with pytest.raises(ConfigError, match=r"rewards\[0\].of=conversation: .*of=sampled"):
        build_rewards(
            [RewardConfig("model", of="conversation", options={"path": str(path), "step_end": "+"})]
        )


async def test_scores_do_not_depend_on_the_batch(path, started):
    unbatched = await started(path, batch_tokens=40)
    batched = await started(path)
    single_scores = [(await scores(unbatched, [text]))[0] for text in TEXTS]
    assert await scores(batched) == pytest.approx(single_scores, abs=1e-5)
    assert await scores(batched, TEXTS[::-1]) == pytest.approx(single_scores[::-1], abs=1e-5)
    assert await scores(unbatched) == pytest.approx(single_scores, abs=1e-5)


@pytest.mark.parametrize("pad_token_id", [None, -1])  # -1: the first LLaMA checkpoints
@pytest.mark.parametrize("texts", [TEXTS, ["12345", "54321"]])  # packed, and of equal length
async def test_a_decoder_without_a_padding_token_scores_its_texts_in_one_batch(
    path, tmp_path, started, pad_token_id, texts
):
    unpadded = copy_with_config(path, tmp_path / "unpadded", pad_token_id=pad_token_id)
    expected = [compute_reference_logit(path, f"2+3{text}=") for text in texts]
    assert await scores(await started(unpadded), texts) == expected


@pytest.mark.parametrize("sign", [1, -1])
async def test_the_default_pass_score_is_logit_0_or_probability_one_half(
    path, tmp_path, started, sign
):
    path = copy_with_weights(
        path, tmp_path / "signed", lambda weights: weights["score.weight"].mul_(sign)
    )
    logits = await judged(await started(path))
    probabilities = await judged(await started(path, sigmoid=True))
    for raw, probability in zip(logits, probabilities, strict=True):
        assert raw.score * sign < 0  # the random head's logits are negative
        assert (
            raw.outcome
            is probability.outcome
            is (RewardOutcome.WRONG if sign == 1 else RewardOutcome.PASS)
        )
        assert probability.score == pytest.approx(1 / (1 + math.exp(-raw.score)))
    least = min(result.score for result in logits)
    strict_results = await judged(await started(path, pass_score=math.nextafter(least, 99)))
    assert [result.outcome for result in strict_results].count(RewardOutcome.WRONG) == 1


async def test_a_long_text_is_an_error_or_truncated_at_its_beginning(path, started):
    long = "1234567890" * 3
    refusing = await started(path, batch_tokens=20)
    with pytest.raises(RewardError, match=r"completion 1 have 34 tokens, .* takes 1 to 20"):
        await scores(refusing, ["5", long])
    with pytest.raises(RewardError, match=r"completion 0 have 204 tokens, .* takes 1 to 128"):
        await scores(await started(path), ["1234567890" * 20])
    truncating = await started(path, batch_tokens=20, on_long_text="truncate")
    assert await scores(truncating, [long]) == await scores(truncating, ["0" + long])
    assert await scores(truncating, [long]) != await scores(truncating, [long + "1"])


def test_a_prompt_longer_than_the_model_takes_is_refused_before_the_run(path):
    messages = ({"role": "user", "content": "12345+123456"},)
    prompt = Prompt("0:4:0", PROMPT.token_ids, messages=messages)

    def check(**options):
        config = RewardConfig("model", options={"path": str(path), **options})
        build_rewards([config]).check_prompts([prompt])

    check(batch_tokens=13)  # the template adds a token
    check(batch_tokens=8, on_long_text="truncate")
    told = r"alone has 13 tokens, the reward model takes 1 to 8, by rewards\[0\]\.batch_tokens "
    with pytest.raises(ConfigError, match=told):
        check(batch_tokens=8)


async def test_a_logit_that_is_not_finite_is_an_error(path, tmp_path, started):
    broken = copy_with_weights(
        path, tmp_path / "nan", lambda weights: weights["score.weight"].fill_(nan)
    )
    rewards = await started(broken)
    with pytest.raises(RewardError, match=r"reward model, uid 0:4:0: .* gives nan for compl"):
        await scores(rewards)


async def test_a_hanging_forward_pass_times_out_without_blocking_the_loop(
    path, started, monkeypatch
):
    rewards = await started(path, timeout_s=0.2, attempts=1)
    release = threading.Event()
    monkeypatch.setattr(ModelRank, "compute_logits", lambda self, rows: release.wait(10))
    with pytest.raises(RewardTimeoutError, match=r"the model took more than 0\.2 s"):
        await scores(rewards)
    release.set()


async def test_a_prompt_rejected_by_the_chat_template_is_named(path, tmp_path):
    refusing = copy_with_config(path, tmp_path / "refusing")
    template = "{% if messages[0].role != 'user' %}{{ messages[0].nope.nope }}{% endif %}="
    (refusing / "chat_template.jinja").write_text(template)
    rewards = build_rewards([RewardConfig("model", options={"path": str(refusing)})])
    rewards.check_prompts([PROMPT])
    system = Prompt("0:7:0", PROMPT.token_ids, messages=({"role": "system", "content": "1"},))
    with pytest.raises(
        ConfigError,
        match=r"uid 0:7:0: .*the reward model's input: the model's chat template refuses",
    ):
        rewards.check_prompts([system])


def refusal(path):
    with pytest.raises(ConfigError) as error:
        build_rewards([RewardConfig("model", options={"path": str(path)})])
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_directory_without_a_reward_model_is_refused_before_loading(path, tmp_path):
    assert "rewards[0].path=/nowhere: no such directory" in refusal("/nowhere")
    (tmp_path / "empty").mkdir()
    assert "contains no tokenizer" in refusal(tmp_path / "empty")
    write_model(tmp_path / "policy")
    message = "Qwen2ForCausalLM without a classification head (the files lack score.weight)"
    assert message in refusal(tmp_path / "policy")
    headless = copy_with_config(path, tmp_path / "headless")
    (headless / "model.safetensors").unlink()
    assert "contains no .safetensors file" in refusal(headless)
    (headless / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "model.safetensors: " in refusal(headless)
    assert "the model has 3 labels, a reward model has one" in refusal(
        write_classifier(tmp_path / "three", num_labels=3)
    )
    mismatched = copy_with_config(path, tmp_path / "mismatched", num_labels=1, hidden_size=32)
    message = "score.weight has shape (1, 64), config.json says (1, 32)"
    assert message in refusal(mismatched)


async def test_a_model_with_missing_parameters_is_refused_at_start(path, tmp_path):
    partial = copy_with_weights(
        path, tmp_path / "part", lambda weights: weights.pop("model.norm.weight")
    )
    rewards = build_rewards([RewardConfig("model", options={"path": str(partial)})])
    with pytest.raises(
        ConfigError,
        match=r"rewards\[0\]\.path=.*part: lacks 1 parameters, such as model\.norm\.weight",
    ):
        await rewards.start()


def test_scorers_request_a_gpu_and_the_memory_of_the_model(path, tmp_path):
    recipe = write_toy(tmp_path) / "recipe.yaml"

    def reward_demand(*overrides, on_gpu):
        config = load_config(recipe, overrides)
        demands = list_resource_demands(config, prepare_run(config), on_gpu)
        return next(demand for demand in demands if demand.role == "reward")

    rule_demand = reward_demand(on_gpu=True)
    assert (rule_demand.gpus, rule_demand.memory_gib) == (0, PROCESS_GIB)
    model = f"rewards=[{{kind: exact}}, {{kind: model, path: {path}}}]"
    assert reward_demand(model, on_gpu=True).gpus == 1
    on_cpu = reward_demand(model, on_gpu=False)
    assert on_cpu.gpus == 0
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    assert on_cpu.memory_gib == pytest.approx(PROCESS_GIB + size / 2**30)


def test_a_split_model_demands_a_gpu_for_each_rank(path, tmp_path):
    recipe = write_toy(tmp_path) / "recipe.yaml"
    model = f"rewards=[{{kind: model, path: {path}, world_size: 2, tensor_parallel: 2}}]"
    config = load_config(recipe, [model, "scorer.replicas=3"])
    demands = list_resource_demands(config, prepare_run(config), on_gpu=True)
    (demand,) = (demand for demand in demands if demand.role == "reward")
    assert (demand.count, demand.gpus) == (6, 1)
    assert demand.setting == "scorer.replicas * the world_size of its model"


def test_a_model_may_have_more_heads_and_so_more_ranks_than_the_policy(tmp_path):
    recipe = write_toy(tmp_path) / "recipe.yaml"  # its policy has two heads
    judge = write_classifier(tmp_path / "judge", num_attention_heads=4, num_key_value_heads=4)
    model = f"rewards=[{{kind: model, path: {judge}, world_size: 4, tensor_parallel: 4}}]"
    assert prepare_run(load_config(recipe, [model])).model_bytes["reward"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("world_size: 2}, {kind: model, name: b, path: m", "world_size=2: a model on "),
        ("world_size: 3, tensor_parallel: 2", "tensor_parallel=2: must divide world_size=3"),
    ],
)
def test_ranks_that_cannot_hold_a_model_are_refused(tmp_path, options, message):
    recipe = write_toy(tmp_path) / "recipe.yaml"
    with pytest.raises(ConfigError, match=rf"^rewards\[0\]\.{message}"):
        load_config(recipe, [f"rewards=[{{kind: model, path: m, {options}}}]"])


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(30, 100))
def test_every_row_is_in_exactly_one_batch_within_the_bound(lengths, max_tokens):
    batches = plan_batches(lengths, max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch and len(batch) * max(lengths[index] for index in batch) <= max_tokens


class FakeCompute:
    """Returns each row's sum once released; records the batches."""

    def __init__(self):
        self.batches, self.released = [], asyncio.Event()

    async def __call__(self, rows):
        self.batches.append(sorted(map(tuple, rows)))
        await self.released.wait()
        if [13] in rows:
            raise ValueError("thirteen")
        return [float(sum(row)) for row in rows]


async def test_rows_that_arrive_during_a_batch_share_the_next():
    compute = FakeCompute()
    batcher = MicroBatcher(compute, max_tokens=10)
    calls = []
    for rows in ([[1], [2]], [[3]], [[4, 4]]):
        calls.append(asyncio.create_task(batcher.compute_rows(rows)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    compute.released.set()
    assert await asyncio.gather(*calls) == [[1.0, 2.0], [3.0], [8.0]]
    assert compute.batches == [[(1,), (2,)], [(3,), (4, 4)]]


async def test_an_error_reaches_only_the_callers_of_its_batch():
    compute = FakeCompute()
    compute.released.set()
    batcher = MicroBatcher(compute, max_tokens=1)
    results = await asyncio.gather(
        *(batcher.compute_rows([[n]]) for n in (5, 13, 6)), return_exceptions=True
    )
    assert results[0] == [5.0] and results[2] == [6.0]
    assert isinstance(results[1], ValueError)


async def test_rows_of_cancelled_callers_are_not_computed():
    compute = FakeCompute()
    batcher = MicroBatcher(compute, max_tokens=10)
    first = asyncio.create_task(batcher.compute_rows([[1]]))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(batcher.compute_rows([[2]]))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    compute.released.set()
    assert await first == [1.0]
    assert compute.batches == [[(1,)]]


async def test_closing_cancels_waiting_callers():
    compute = FakeCompute()
    batcher = MicroBatcher(compute, max_tokens=10)
    waiting = asyncio.create_task(batcher.compute_rows([[1]]))
    await asyncio.sleep(0.01)
    batcher.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 1)
