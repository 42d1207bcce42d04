"""Layers split over ranks, experts dealt to ranks and tokens shared by ranks, in many families."""

import functools
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from streamrl.engines.models.tensor_parallel import list_shared_norms
from streamrl.engines.models.tensor_parallel_support import check_trainer_split
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from tests import forked
from tests.engines.split_model_ranks import (
    WORLD,
    SplitCase,
    compare_with_single_rank,
    count_on_one_of_two,
    run_alone,
    run_rank,
)
from tests.engines.tiny_families import VOCABULARY, make_model
from tests.engines.trainer_ranks import find_free_ports

pytestmark = pytest.mark.xdist_group("ranks")

ODD_VOCABULARY = VOCABULARY + 1
QUICK = [
    SplitCase("qwen3_moe", tensor=2),
    SplitCase("qwen3", tensor=2, dtype="bfloat16"),
    SplitCase("qwen3", tensor=2, sequence=2, zero_stage=0),
    SplitCase("mistral", sequence=2, recomputes=True),
    SplitCase("gemma2", tensor=2),
    # A vocabulary that two ranks cannot split.
    SplitCase("qwen2", tensor=2, changes=(("vocab_size", ODD_VOCABULARY),)),
]
FAMILIES = [
    *("gpt_oss", "gpt_neox", "gemma", "gemma3_text", "phi3", "olmo2", "olmo3", "smollm3"),
    *("granite", "qwen2_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "cohere"),
]
"""Besides those with changed settings below."""
SHARED = ["qwen2", "gemma3_text", "phi3", "qwen3_moe", "deepseek_v3", "gpt_neox"]
SLOW = [SplitCase(family, tensor=2) for family in FAMILIES]
SLOW += [SplitCase(family, sequence=2) for family in SHARED]
SLOW += [SplitCase("qwen3", sequence=2, backend="deepspeed", zero_stage=z) for z in (1, 2, 3)]
SLOW += [SplitCase("qwen3_moe", tensor=2, sequence=2, recomputes=True)]
# A biased head; rows of a tensor-parallel rank that FSDP2 cannot shard evenly; padding.
SLOW += [SplitCase("phi", tensor=2)]
SLOW += [SplitCase("qwen2", tensor=2, kind=kind) for kind in ("critic", "two heads")]
SLOW += [SplitCase("llama", tensor=2, changes=(("vocab_size", VOCABULARY + 2),))]
SLOW += [
    SplitCase(
        "gemma3_text",
        tensor=4,
        zero_stage=0,
        changes=(("pad_token_id", 90), ("num_key_value_heads", 4)),
    )
]
SLOW += [SplitCase("qwen3", tensor=4, zero_stage=0, dtype="bfloat16")]
# Norms of queries and keys that the plan omits.
SLOW += [SplitCase("glm4_moe", tensor=2, changes=(("use_qk_norm", True),))]
CASES = [*QUICK, *SLOW]


@functools.cache
def train_alone(family: str, changes: tuple[tuple[str, Any], ...], kind: str) -> dict[str, Any]:
    (result,) = forked.run(run_alone, [(family, changes, kind)], timeout_s=120.0)
    return dict(result)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.label, marks=[pytest.mark.slow] * (case not in QUICK))
        for case in CASES
    ],
)
def test_scores_and_updates_equal_those_of_a_single_rank(case: SplitCase):
    # Each case has processes of its own: torch keeps names of groups that have ended.
    (port,) = find_free_ports(1)
    ranks = [(rank, port, case) for rank in range(WORLD)]
    single = train_alone(case.family, case.changes, case.kind)
    results = compare_with_single_rank(case, single, forked.run(run_rank, ranks, timeout_s=180.0))
    assert results["ok"], results


def test_ranks_reduce_small_tensors_and_never_have_all_logits():
    words, tokens = 4 * VOCABULARY, 256
    (counts,) = forked.run(count_on_one_of_two, [("qwen3", words, tokens)], timeout_s=120.0)
    # Two layers with attention and MLP; the embedding; maxima and sums of a chunk's logits.
    # Matrices of the same input sum its gradients together.
    assert counts["forward"] == 4 + 1 + 2
    # The layers and the head's inputs; the chunk once more.
    assert counts["backward"] == 4 + 1 + 2
    assert counts["widest"] == tokens * words // 2


@pytest.mark.parametrize(
    ("settings", "trainer", "message"),
    [
        (
            {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2},
            {"sequence_parallel": 2, "tensor_parallel": 2},
            "sequence_parallel=2: times tensor_parallel=2 must divide the model's"
            " num_key_value_heads=2",
        ),
        (
            {"model_type": "gpt2"},
            {"tensor_parallel": 2},
            "tensor_parallel=2: transformers has no plan to split layers of gpt2",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 6, "num_key_value_heads": 4},
            {"tensor_parallel": 4},
            "tensor_parallel=4: must divide the model's num_experts=6",
        ),
    ],
)
def test_a_model_that_ranks_cannot_split_is_rejected(
    tmp_path: Path, settings: dict[str, Any], trainer: dict[str, Any], message: str
):
    AutoConfig.for_model(**settings).save_pretrained(tmp_path)
    config = TrainerConfig(backend="torch", world_size=4, **trainer)
    with pytest.raises(ConfigError) as refusal:
        check_trainer_split(str(tmp_path), config)
    assert str(refusal.value) == f"trainer.{message}"


def test_a_norm_that_cannot_be_split_is_refused_with_the_setting_and_its_model():
    model = make_model("cohere", use_qk_norm=True)
    model.name_or_path = "models/critic"
    words = r"^critic.trainer.tensor_parallel: \S+q_norm.weight of models/critic has all heads"
    with pytest.raises(ConfigError, match=words):
        list_shared_norms(model, "critic.trainer")
