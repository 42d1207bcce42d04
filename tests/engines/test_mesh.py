"""Data times tensor parallel training: the update of one rank, in meshes of four."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.engines.split_models import check_tensor_parallel
from streamrl.errors import ConfigError
from tests.engines.mesh_ranks import CASES, LR, UPDATES, WORLD, label
from tests.engines.trainer_ranks import free_ports

LABELS = [label(model, mesh, bool(how)) for model, mesh, how in CASES]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, by case."""
    folder = tmp_path_factory.mktemp("mesh")
    ports = [str(port) for port in free_ports(len(CASES))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.mesh_ranks", str(folder), *ports],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.slow
@pytest.mark.parametrize("case", LABELS)
def test_the_updates_are_those_of_one_rank(ranks: list[dict[str, Any]], case: str) -> None:
    for seen in ranks:
        alone, mesh = seen[f"{case.split(';')[0]}; alone"], seen[case]
        assert min(alone["norms"][:UPDATES]) > 1, "the gradient is clipped"
        assert mesh["norms"][:UPDATES] == pytest.approx(alone["norms"][:UPDATES], rel=1e-5)
        assert list(mesh["parameters"]) == list(alone["parameters"])
        for name, expected in alone["parameters"].items():
            assert mesh["parameters"][name].shape == expected.shape
            apart = (mesh["parameters"][name] - expected).abs()
            assert apart.max() <= 2 * UPDATES * LR, name
            # Adam makes whole steps of gradients that are rounding, as those of a key's bias are.
            if not name.endswith("k_proj.bias"):
                assert (apart > 0.1 * LR).double().mean() < 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("case", LABELS)
def test_a_norm_that_is_not_finite_changes_nothing(ranks: list[dict[str, Any]], case: str) -> None:
    for seen in ranks:
        assert not torch.tensor(seen[case]["norms"][UPDATES]).isfinite()
        assert seen[case]["unchanged"]


@pytest.mark.slow
@pytest.mark.parametrize("case", LABELS)
def test_what_a_rank_keeps_is_where_it_says(ranks: list[dict[str, Any]], case: str) -> None:
    for seen in ranks:
        assert seen[case]["misplaced"] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in LABELS if "sharded" not in case])
def test_a_rank_holds_nothing_of_what_others_train(ranks: list[dict[str, Any]], case: str) -> None:
    for seen in ranks:
        assert seen[case]["memory_bytes"] == seen[case]["kept_bytes"]


@pytest.mark.parametrize(
    ("settings", "count", "message"),
    [
        ({"model_type": "gpt2"}, 2, "splits models of type llama, mistral, qwen2, not gpt2"),
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
def test_a_model_that_cannot_be_split_is_refused(
    tmp_path: Path, settings: dict[str, Any], count: int, message: str
) -> None:
    from transformers import AutoConfig

    kind = settings.pop("model_type")
    AutoConfig.for_model(kind, **settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        check_tensor_parallel(str(tmp_path), count, section="trainer")
    assert str(refusal.value) == f"trainer.tensor_parallel={count}: {message}"
