"""Rows of the algorithm table, and validation of configs."""

import dataclasses
from pathlib import Path

import pytest

from streamrl.algorithms import (
    ALGORITHMS,
    AlgorithmConfig,
    list_derivation_columns,
    list_required_columns,
)
from streamrl.algorithms.correction import CorrectionConfig
from streamrl.algorithms.table import group_relative, variant
from streamrl.config.algorithm_dry_run import dry_run_algorithm
from streamrl.config.run_config import load_config
from streamrl.errors import ConfigError
from tests.algorithms.steps import derive_columns, make_settings, make_step

GRPO_RECIPE = Path(__file__).parents[2] / "configs" / "grpo_arithmetic.yaml"


def test_a_rows_defaults_fill_only_null_settings():
    grpo, dapo = (make_settings(AlgorithmConfig(name=name)) for name in ("grpo", "dapo"))
    assert (grpo.clip_low, grpo.clip_high, grpo.advantage_scale) == (0.2, 0.2, "std")
    assert grpo.loss_aggregation == "seq-mean-token-mean"
    assert (dapo.clip_low, dapo.clip_high) == (0.2, 0.28)
    assert (dapo.loss_aggregation, dapo.kl_coef, dapo.dual_clip) == ("token-mean", 0.0, None)
    chosen = make_settings(AlgorithmConfig(name="dapo", clip_high=0.5, dual_clip=3.0))
    assert chosen == dataclasses.replace(dapo, clip_high=0.5, dual_clip=3.0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_groups_of_equal_scores_teach_nothing_if_an_algorithm_needs_two_rollouts(name: str):
    step = make_step()
    for column in ("scores", *(name for name in step.columns if name.startswith("reward/"))):
        step.columns[column] = step.group_ids.double()
    # All of a score falls on the only turn of its rollout.
    del step.columns["token_scores"], step.columns["turn_ends"]
    has_signal = bool(derive_columns(AlgorithmConfig(name=name), step)["advantages"].any())
    # The teacher of gkd is in its loss.
    assert has_signal == (ALGORITHMS[name].min_group_size == 1 and name != "gkd")


@pytest.mark.parametrize(
    ("config", "scope"),
    [
        (AlgorithmConfig(), "group"),
        (AlgorithmConfig(advantage_scale="batch"), "step"),
        (AlgorithmConfig(whiten_advantages=True), "step"),
        (AlgorithmConfig(name="rloo"), "group"),
        (AlgorithmConfig(name="gpg"), "step"),
        (AlgorithmConfig(name="reinforce_pp"), "step"),
        (AlgorithmConfig(name="reinforce_pp", whiten_advantages=False), "group"),
    ],
)
def test_normalization_over_the_step_needs_scope_step(config, scope):
    assert config.scope == make_settings(config).scope == scope


def test_reward_components_come_with_the_scores():
    configs = [AlgorithmConfig(name=name) for name in ("grpo", "gdpo")]
    required = [list_required_columns(config.spec, make_settings(config)) for config in configs]
    assert required[0] == required[1]


@pytest.mark.parametrize(
    ("settings", "columns"),
    [
        ({}, ()),
        ({"kl_coef": 0.1}, ()),
        (
            {"kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"},
            ("generator_logprobs", "ref_logprobs"),
        ),
        ({"name": "gdpo"}, ("reward/right", "reward/short")),
    ],
)
def test_advantages_are_derived_from_few_columns(settings, columns):
    config = AlgorithmConfig(**settings)
    expected = ("lengths", "loss_mask", "finish_reason", "scores", *columns)
    assert list_derivation_columns(config.spec, make_settings(config)) == expected


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            AlgorithmConfig,
            {"name": "grppo"},
            "name=grppo: no such .*; the nearest .* is grpo",
        ),
        (AlgorithmConfig, {"group_size": 1}, "group_size=1: must be at least 2, because grpo comp"),
        (AlgorithmConfig, {"kl_target": 0.1}, "kl_target=0.1: needs algorithm.kl_coef above 0"),
        (
            AlgorithmConfig,
            {"kl_in": "reward", "kl_kind": "k3+"},
            r"kl_kind=k3\+: .*kl_kind=k3\.$",
        ),
        (
            AlgorithmConfig,
            {"params": {"a.tau": 1.0}},
            "a.tau=1.0: unknown; params of grpo: top_entropy$",
        ),
        (AlgorithmConfig, {"name": "sapo", "params": {"tau": 1.0}}, "sapo: temperature_positive,"),
        (
            AlgorithmConfig,
            {"name": "sapo", "params": {"temperature_negative": "hot"}},
            "must be a number",
        ),
        (AlgorithmConfig, {"kl_coef": 0.1, "kl_kind": "k2*"}, "kl_kind=k2\\*: must be one of"),
        (CorrectionConfig, {"normalize_weights": True}, "no effect with weights=none"),
        (CorrectionConfig, {"weights": "token"}, "weights=token: .* Set correction.proximal=train"),
        (CorrectionConfig, {"reject": "k1"}, "reject=k1: needs reject_low or reject_high"),
        (CorrectionConfig, {"reject": "k3", "reject_low": 0.1}, "reject_low=0.1: .*reject_high.$"),
        (CorrectionConfig, {"weight_low": 3.0}, "weight_low=3.0: must be below weight_high=2.0"),
    ],
)
def test_an_invalid_config_is_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "contains no Algorithm"),
        (
            "from functools import partial\n"
            "from streamrl.algorithms.table import group_relative\n"
            "from streamrl.algorithms.table import GRPO, variant\n"
            "OWN = variant('own', 'x', GRPO, advantages=partial(group_relative))\n",
            "own.py:4: ValueError: algorithm own: functools.partial(",
        ),
    ],
)
def test_a_file_without_a_row_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ConfigError) as refusal:
        AlgorithmConfig(path=str(tmp_path / "own.py"))
    assert "algorithm.path=" in str(refusal.value)
    assert message in str(refusal.value)


SHARED = "critic.shared_coef=1"
BAD_ROWS = """
import torch

from streamrl.algorithms.table import variant


def broken(columns, group_ids, settings):
    return columns["nothing"]


def still(tokens, settings):
    return tokens.log_ratio.detach(), tokens.loss_mask

def endless(columns, group_ids, settings):
    return columns["scores"] / 0

def stuck(value, shown, settings):
    shown["score"]

def soft(tokens, settings):
    return tokens.log_ratio, torch.zeros(tokens.log_ratio.shape)

def half(tokens, settings):
    return tokens.log_ratio.sum(-1, keepdim=True)

def quits(tokens, settings):
    exit(3)

def short(columns, group_ids, settings):
    return torch.zeros(3)

def rooted(columns, group_ids, settings):
    return columns["scores"].sqrt() * vars(settings)["gamma"]

STILL = variant("still", "x", token_loss=still)
NOBODYS = variant("nobodys", "x", columns=("scores", "foo"))
UNKNOWN = variant("unknown", "x", defaults={"clip_hihg": 1})
WRONG = variant("wrong", "x", defaults={"loss_aggregation": "tokenmean"})
UNTAUGHT = variant("untaught", "x", columns=("scores", "values"))
BROKEN = variant("broken", "x", advantages=broken)
SOFT = variant("soft", "x", token_loss=soft)
HALF = variant("half", "x", token_loss=half)
QUITS = variant("quits", "x", token_loss=quits)
SHORT = variant("short", "x", advantages=short)
LIKELIEST = variant("likeliest", "x", columns=("scores", "greedy_ids"))
ROOTED = variant("rooted", "x", advantages=rooted)
ENDLESS = variant("endless", "x", advantages=endless)
OUTSIDE = variant("outside", "x", params={"tau": 2.0}, limits={"tau": (0.0, 1.0)})
STUCK = variant("stuck", "x", params={"knob": 1.0}, dials={"knob": stuck})
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobodys", "stage train needs column foo: no stage produces it"),
        ("unknown", "algorithm unknown: defaults contain clip_hihg; allowed are clip_low"),
        ("wrong", "algorithm.loss_aggregation=tokenmean: must be one of token-mean"),
        ("untaught", "algorithm untaught: derived lacks returns, the target of the critic"),
        ("still", "algorithm still: the loss has no gradient"),
        ("endless", "algorithm endless: advantages is not finite with params {}"),
        ("stuck", "algorithm stuck: dial knob returned None, expected a finite number"),
        ("soft", r"algorithm soft: soft: the clipped mask is torch.float32, must be bool"),
        ("half", r"algorithm half: half returned a Tensor, expected \(loss, clipped mask\)"),
        ("quits", r"algorithm quits: quits at .*own.py:\d+: SystemExit: 3"),
        ("short", r"algorithm short: short returned shape \[3\], expected \[16\] or \[16, 4\]"),
        ("likeliest", "algorithm likeliest: column greedy_ids has no values per rollout"),
        ("outside", "algorithm.params.tau=2.0: must be at least 0 and at most 1"),
        ("broken", r"algorithm broken: broken at .*own.py:8: KeyError: 'nothing'"),
    ],
)
def test_a_row_that_cannot_train_is_refused_at_config_load(tmp_path, name, message):
    (tmp_path / "own.py").write_text(BAD_ROWS)
    chosen = [f"algorithm.path={tmp_path}/own.py", f"algorithm.name={name}"]
    with pytest.raises(ConfigError, match=message) as error:
        load_config(GRPO_RECIPE, chosen)
    assert "\n" not in str(error.value)


def test_unused_settings_of_a_custom_row_are_not_refused(tmp_path):
    (tmp_path / "own.py").write_text(BAD_ROWS)
    chosen = [f"algorithm.path={tmp_path}/own.py", "algorithm.name=rooted", "algorithm.gamma=0.9"]
    assert load_config(GRPO_RECIPE, chosen).algorithm_settings.gamma == 0.9
    built_in = AlgorithmConfig(name="dapo", path=str(tmp_path / "own.py"))
    assert built_in.spec.name == "dapo", "beside a file's own rows"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limits": {"tau": (0.0, 1.0)}}, r"limits \['tau'\] are not in params"),
        ({"derived": {"loss_mask": group_relative}}, r"derived \['loss_mask'\] is a reserved name"),
    ],
)
def test_an_inconsistent_row_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        variant("own", "x", **changes)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("pass_at_k", ["algorithm.advantage_scale=batch"], "must be std or none"),
        ("ppo", ["algorithm.params.lam=5"], "params.lam=5: must be at least 0 and at most 1"),
        ("rloo", ["algorithm.advantage_scale=batch"], "rloo does not use it"),
        ("grpo", ["algorithm.gamma=0.9"], "gamma=0.9: has no effect: grpo does not use it"),
        ("grpo", ["critic.warmup_alone=3"], "warmup_alone=3: has no effect: grpo has no critic"),
        ("ppo", [SHARED, "critic.trainer.lr=1e-3"], '"lr": 0.001}: needs a separate crit'),
        ("safe_rlhf", ["costs=[{kind: exact}]", SHARED], "only a single value critic"),
        ("clip_cov", ["algorithm.params.covariance_low=6"], r"\(6, 5.0\): low must be below high"),
        (
            "ppo",
            ["algorithm.group_size=1", "filter.kind=equal_rewards"],
            "filter.kind=equal_rewards: has no effect: algorithm.group_size=1",
        ),
        ("grpo", ["algorithm.correction.reject_high=2"], "has no effect with reject=none"),
        ("gigpo", [], "gigpo: compares turns in equal states of an environment. Set environment.p"),
        ("ppo", ["algorithm.time_step=turn", "algorithm.gamma=2"], "gamma=2.0: must be at least 0"),
        (
            "grpo",
            ["algorithm.time_step=turn"],
            "time_step=turn: has no effect: grpo has no",
        ),
        ("grpo_turn", ["algorithm.time_step=turn"], "grpo_turn counts time in turns"),
        (
            "distill",
            ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_kind=k1"],
            "in its adv",
        ),
        ("gdpo", ["algorithm.overlong_buffer=4"], "normalizes every reward separately"),
        ("distill", ["filter.kind=equal_rewards"], "equal rewards, from which distill learns"),
        ("gkd", ["algorithm.params.top_k=2.5"], "params.top_k=2.5: must be a whole number"),
        ("gkd", ["reference={world_size: 2, tensor_parallel: 2}"], "words that were not sampled"),
    ],
)
def test_settings_incompatible_with_a_row_are_refused_at_config_load(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(GRPO_RECIPE, [f"algorithm.name={name}", *overrides])


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("has_episodes", [False, True])
def test_every_row_passes_the_dry_run(name, has_episodes):
    config = AlgorithmConfig(name=name)
    settings = config.to_settings(
        max_length=8, reward_weights={"right": 1.0}, has_episodes=has_episodes
    )
    dry_run_algorithm(config.spec, settings)
