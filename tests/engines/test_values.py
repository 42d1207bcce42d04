"""Critic values: before each token, from body and head, in trainer and scorer."""

import numpy as np
import pytest
import torch

from streamrl.engines.models.chunked_head import run_scoring_forward
from streamrl.engines.models.forward import (
    compute_token_values,
    load_two_headed_model,
    load_value_model,
    shift_right,
)
from streamrl.errors import WeightsError
from streamrl.messages import GroupInfo, check_column_sizes, measure_columns, split_token_column
from streamrl.weights.parameters import LORA_A_SUFFIX, LORA_B_SUFFIX, LORA_SCALE
from tests.engines.scoring_models import make_shadow_critic
from tests.engines.tiny_groups import make_groups
from tests.engines.tiny_qwen import save, tiny_model

pytestmark = pytest.mark.usefixtures("process_group_of_models")

COLUMNS = make_groups(num_groups=1, group_size=6)["0:0:0"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save(tiny_model(tied=True, seed=1), tmp_path_factory.mktemp("critic"))


def make_critic_with_head(model_path):
    """Return a critic with a non-zero head."""
    model = load_value_model(model_path, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.manual_seed(0)
        model.score.weight.normal_()
        model.score.bias.fill_(0.25)
    return model


def test_a_value_depends_on_the_tokens_before_its_own(model_path):
    model = make_critic_with_head(model_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    attention = torch.ones_like(ids, dtype=torch.bool)
    values = compute_token_values(model, ids, attention)
    hidden = model.model(input_ids=ids).last_hidden_state
    expected = model.score(hidden)[0, :, 0]
    torch.testing.assert_close(values[0, 1:], expected[:-1])


def compute_values(critic):
    (values,) = critic.compute_columns([COLUMNS], "values", micro_batch_tokens=64)
    return values


def follow(critic, tensors):
    critic.copy_weights(critic.build_full(tensors))


def test_a_value_scorer_follows_the_critic(model_path):
    scorer, trained = make_shadow_critic(model_path), make_critic_with_head(model_path)
    assert not compute_values(scorer).any()
    follow(scorer, dict(trained.named_parameters(remove_duplicate=False)))
    values = compute_values(scorer)
    check_column_sizes(measure_columns({"values": values}), GroupInfo.from_columns(COLUMNS))
    expected = []
    for ids in split_token_column(COLUMNS["token_ids"], COLUMNS["lengths"]):
        tokens = torch.from_numpy(ids)[None].long()
        expected.append(compute_token_values(trained, tokens, tokens >= 0)[0].detach().numpy())
    masked = np.where(COLUMNS["loss_mask"], np.concatenate(expected), 0)
    np.testing.assert_allclose(values, masked, atol=2e-5)


def test_a_value_scorer_merges_adapters_and_loads_the_head(model_path):
    trained = make_critic_with_head(model_path)
    a, b = torch.randn(1, 64, generator=torch.manual_seed(0)), torch.ones(64, 1)
    layer = "model.layers.0.self_attn.q_proj"
    published = {layer + LORA_A_SUFFIX: a, layer + LORA_B_SUFFIX: b, LORA_SCALE: torch.tensor(0.5)}
    published |= {name: p for name, p in trained.named_parameters() if name.startswith("score.")}
    with torch.no_grad():
        trained.get_submodule(layer).weight += 0.5 * b @ a
    scorer, expected = make_shadow_critic(model_path), make_shadow_critic(model_path)
    follow(expected, dict(trained.named_parameters(remove_duplicate=False)))
    for _ in range(2):
        follow(scorer, published)
        np.testing.assert_allclose(compute_values(scorer), compute_values(expected), atol=1e-6)


def test_a_value_scorer_of_a_shared_model_loads_its_part_of_the_policy(model_path):
    model = load_two_headed_model(model_path, dtype=torch.float32).eval()
    critic = make_critic_with_head(model_path)
    model.score.load_state_dict(critic.score.state_dict())
    shared = make_shadow_critic(model_path, shares_policy=True)
    follow(shared, dict(model.named_parameters(remove_duplicate=False)))
    separate = make_shadow_critic(model_path)
    follow(separate, dict(critic.named_parameters(remove_duplicate=False)))
    np.testing.assert_allclose(compute_values(shared), compute_values(separate), atol=1e-6)
    with pytest.raises(WeightsError, match="the weights lack"):
        follow(shared, dict(tiny_model(tied=True, seed=1).named_parameters()))


def test_two_heads_of_a_forward_pass_equal_two_models(model_path):
    model = load_two_headed_model(model_path, dtype=torch.float32).eval()
    critic = make_critic_with_head(model_path)
    model.score.load_state_dict(critic.score.state_dict())
    ids = torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0]])
    attention = torch.tensor([[True] * 4, [True, True, False, False]])
    output = model(input_ids=ids, attention_mask=attention.long(), use_cache=False)
    scores = run_scoring_forward(model, ids, attention, temperature=1.0, entropy_mode="none")
    assert scores.state_values is not None
    torch.testing.assert_close(
        shift_right(scores.state_values, attention), compute_token_values(critic, ids, attention)
    )
    plain = tiny_model(tied=True, seed=1)(input_ids=ids, attention_mask=attention.long())
    torch.testing.assert_close(output.logits, plain.logits)
