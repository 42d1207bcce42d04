"""LoRA merge: W0 + scale B A, always from the stored W0."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from streamrl.errors import WeightsError
from streamrl.weights.parameters import (
    LORA_A_SUFFIX,
    LORA_B_SUFFIX,
    LORA_SCALE,
    LoraAdapter,
    ParameterSet,
    build_full_weights,
)

CPU = torch.device("cpu")


class Value(torch.nn.Module):
    """A value model: the body of a tied model, stored in two files, and a head that is not
    stored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 3)
        self.proj = torch.nn.Linear(3, 2, bias=False)
        self.again = torch.nn.Embedding(6, 3)
        self.again.weight = self.embed.weight
        self.score = torch.nn.Linear(2, 1, bias=False)


PARAMETERS = ParameterSet.from_module(Value())
STORED = {
    "embed.weight": torch.arange(18.0).view(6, 3),
    "proj.weight": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
    "lm_head.weight": torch.ones(6, 3),
}
A = torch.tensor([[1.0, 0.0, -1.0]])
B = torch.tensor([[0.5], [2.0]])
PUBLISHED = {
    "proj" + LORA_A_SUFFIX: A,
    "proj" + LORA_B_SUFFIX: B,
    "score.weight": torch.tensor([[7.0, 8.0]]),
    LORA_SCALE: torch.tensor(2.0),
}


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    names = sorted(STORED)
    save_file({name: STORED[name] for name in names[:1]}, tmp_path / "model-1.safetensors")
    save_file({name: STORED[name] for name in names[1:]}, tmp_path / "model-2.safetensors")
    weight_map = {name: f"model-{1 if name == names[0] else 2}.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return str(tmp_path)


def test_merge_computes_in_float32():
    weight, a, b = (torch.full(shape, 1.0, dtype=torch.bfloat16) for shape in [(1, 1)] * 3)
    merged = LoraAdapter(a, b, scale=2**-10).compute_merged(weight)
    assert merged.dtype == torch.float32
    assert merged.item() == 1 + 2**-10  # not representable in bfloat16


def test_full_weights_combine_adapters_head_and_model_directory(model_path: str):
    full = build_full_weights(PUBLISHED, PARAMETERS, model_path=model_path, device=CPU)
    assert full.keys() == PARAMETERS.shapes.keys()
    # 2 B A = [[1, 0, -1], [4, 0, -4]]; each merge starts from the stored weight.
    for _ in range(2):
        assert full["proj.weight"].tolist() == [[2.0, 2.0, 2.0], [8.0, 5.0, 2.0]]
    assert full["score.weight"].tolist() == [[7.0, 8.0]]
    for name in ("embed.weight", "again.weight"):
        assert torch.equal(full[name], STORED["embed.weight"])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"proj" + LORA_A_SUFFIX: torch.ones(1, 4)}, r"A \(1, 4\) and B \(2, 1\) fit no weight"),
        (
            {"k" + LORA_A_SUFFIX: A, "k" + LORA_B_SUFFIX: B},
            r"adapter of k.weight: .* fit no weight of the model",
        ),
        ({"k" + LORA_A_SUFFIX: A}, "have unknown 1 parameters, such as k.lora_A"),
    ],
)
def test_adapters_of_a_different_model_are_refused(
    model_path: str, change: dict[str, torch.Tensor], fault: str
):
    with pytest.raises(WeightsError, match=fault):
        build_full_weights(PUBLISHED | change, PARAMETERS, model_path=model_path, device=CPU)
