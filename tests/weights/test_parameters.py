import pytest
import torch

from streamrl.errors import WeightsError
from streamrl.weights.parameters import ParameterSet, order_for_fusion
from tests.engines.tiny_qwen import tiny_model


class Tied(torch.nn.Module):
    """An embedding that shares its weight with the head, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.LayerNorm(4, bias=False)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied_name", ["embed.weight", "head.weight"])
def test_any_tied_name_is_enough(tied_name: str):
    weight = torch.ones(6, 4)
    full = ParameterSet.from_module(Tied()).expand_tied(
        {tied_name: weight, "norm.weight": torch.ones(4)}
    )
    assert full["embed.weight"] is weight
    assert full["head.weight"] is weight


@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        ({"weight": torch.ones(2, 3)}, "the weights lack 1 parameters, such as bias"),
        (
            {"weight": torch.ones(2, 3), "bias": torch.ones(2), "c": torch.ones(1)},
            "the weights have unknown 1 parameters, such as c",
        ),
        (
            {"weight": torch.ones(3, 2), "bias": torch.ones(2)},
            r"weight has shape \(3, 2\), expected \(2, 3\)",
        ),
    ],
)
def test_missing_unknown_and_misshapen_parameters_are_named(
    tensors: dict[str, torch.Tensor], fault: str
):
    with pytest.raises(WeightsError, match=fault):
        ParameterSet.from_module(torch.nn.Linear(3, 2)).expand_tied(tensors)


def test_tied_names_go_by_the_first_name():
    model = tiny_model(tied=True, seed=0)
    assert ParameterSet.from_module(model).unique_names == order_for_fusion(
        dict(model.named_parameters())
    )
    assert "lm_head.weight" not in ParameterSet.from_module(model).unique_names
