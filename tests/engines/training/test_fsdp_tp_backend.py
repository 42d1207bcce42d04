"""Data and tensor parallel training in meshes of four ranks, against a single rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.engines.models.tensor_parallel_support import check_tensor_parallel
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from tests import forked
from tests.engines.conftest import list_cases, param_of_ranks
from tests.engines.mesh_ranks import (
    BFLOAT16_CASES,
    CASES,
    LR,
    UPDATES,
    WIDE,
    WORLD,
    MeshCase,
    make_single_rank_key,
    run_rank,
)
from tests.engines.trainer_ranks import find_free_ports

pytestmark = pytest.mark.xdist_group("ranks")

QUICK = [MeshCase("qwen2 tied", "data 2, tensor 2"), MeshCase("llama", WIDE)]
QUICK += [MeshCase("qwen2 tied", mesh, dtype="bfloat16") for mesh in ("tensor 4", WIDE)]
CASE_PARAMS, BFLOAT16_PARAMS = (
    [param_of_ranks(case, cases=[case], is_quick=case in QUICK, label=case.label) for case in cases]
    for cases in (CASES, BFLOAT16_CASES)
)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return each rank's results, by case."""
    cases = list_cases(request, MeshCase)
    ports = find_free_ports(len(cases))
    arguments = [(rank, ports, cases) for rank in range(WORLD)]
    all_results = forked.run(run_rank, arguments, timeout_s=400)
    every = ((name, result) for results in all_results for name, result in results.items())
    single_rank = {name: result for name, result in every if "alone" in name}
    return [results | single_rank for results in all_results]


@pytest.mark.parametrize("case", CASE_PARAMS)
def test_updates_equal_those_of_a_single_rank(ranks: list[dict[str, Any]], case: MeshCase):
    for results in ranks:
        single, mesh = results[make_single_rank_key(case.model)], results[case.label]
        assert min(single["norms"][:UPDATES]) > 1, "the gradient is clipped"
        assert mesh["norms"][:UPDATES] == pytest.approx(single["norms"][:UPDATES], rel=1e-5)
        assert list(mesh["parameters"]) == list(single["parameters"])
        for name, expected in single["parameters"].items():
            assert mesh["parameters"][name].shape == expected.shape
            difference = (mesh["parameters"][name] - expected).abs()
            assert difference.max() <= 2 * UPDATES * LR, name
            # Adam makes full steps of gradients that are rounding, such as those of key biases.
            if not name.endswith("k_proj.bias"):
                assert (difference > 0.1 * LR).double().mean() < 1e-3, name


@pytest.mark.parametrize("case", BFLOAT16_PARAMS)
def test_bfloat16_updates_float32_master_weights(ranks: list[dict[str, Any]], case: MeshCase):
    for results in ranks:
        single, mesh = results[make_single_rank_key(case.model)], results[case.label]
        # The forward and backward pass in bfloat16 move the gradient's norm by up to 2 %.
        assert mesh["norms"][:UPDATES] == pytest.approx(single["norms"][:UPDATES], rel=0.02)
        for name, box, masters in mesh["masters"]:
            assert masters.dtype == torch.float32
            # The published weights are those that the forward pass uses.
            assert torch.equal(mesh["parameters"][name][box], masters.bfloat16()), name
            difference = (masters - single["parameters"][name][box]).abs()
            assert difference.max() <= 2 * UPDATES * LR, name
            # An update is smaller than a bfloat16's last bit: without master weights it is lost.
            if not name.endswith("k_proj.bias"):
                assert difference.mean() < 0.3 * LR, name


@pytest.mark.parametrize("case", [*CASE_PARAMS, *BFLOAT16_PARAMS])
def test_a_non_finite_gradient_norm_changes_no_parameter(
    ranks: list[dict[str, Any]], case: MeshCase
):
    for results in ranks:
        assert not torch.tensor(results[case.label]["norms"][UPDATES]).isfinite()
        assert results[case.label]["unchanged"]


@pytest.mark.parametrize("case", [*CASE_PARAMS, *BFLOAT16_PARAMS])
def test_a_shard_holds_the_elements_it_describes(ranks: list[dict[str, Any]], case: MeshCase):
    for results in ranks:
        assert results[case.label]["misplaced"] == []


@pytest.mark.parametrize("case", [param for param in CASE_PARAMS if "sharded" not in str(param.id)])
def test_a_rank_holds_no_memory_of_other_ranks_shards(ranks: list[dict[str, Any]], case: MeshCase):
    for results in ranks:
        assert results[case.label]["memory_bytes"] == results[case.label]["kept_bytes"]


@pytest.mark.parametrize(
    ("settings", "count", "message"),
    [
        ({"model_type": "gpt2"}, 2, "transformers has no plan to split layers of gpt2"),
        (
            {"model_type": "qwen3_moe", "num_experts": 6, "num_key_value_heads": 4},
            4,
            "must divide the model's num_experts=6",
        ),
        (
            {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 1},
            2,
            "must divide the model's num_key_value_heads=1",
        ),
        (
            {"model_type": "qwen2", "num_attention_heads": 4, "intermediate_size": 33},
            4,
            "must divide the model's intermediate_size=33",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_rejected(
    tmp_path: Path, settings: dict[str, Any], count: int, message: str
):
    from transformers import AutoConfig

    kind = settings.pop("model_type")
    AutoConfig.for_model(kind, **settings).save_pretrained(tmp_path)
    trainer = TrainerConfig(backend="torch", world_size=count, tensor_parallel=count)
    with pytest.raises(ConfigError) as refusal:
        check_tensor_parallel(str(tmp_path), trainer, section="trainer")
    assert str(refusal.value) == f"trainer.tensor_parallel={count}: {message}"
