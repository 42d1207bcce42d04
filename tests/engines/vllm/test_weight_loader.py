"""Parameters as views and as copies of the published tensors, without an engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.engines.vllm.local_pieces import _match_split
from streamrl.engines.vllm.plain_layers import (
    MIN_ONEDNN_ELEMENTS,
    _has_onednn_kernel,
    choose_linears,
    onednn_linear,
)
from streamrl.engines.vllm.rank_loader import RankLoader
from streamrl.engines.vllm.weight_loader import BoundParameter, view_as_block


def test_a_quantized_model_is_not_compared_with_its_files(tmp_path: Path):
    config = SimpleNamespace(model_config=SimpleNamespace(quantization="fp8"))
    model = torch.nn.Linear(4, 4, device="meta")
    parameters: Any = SimpleNamespace(shapes={})
    worker: Any = SimpleNamespace(get_model=lambda: model, vllm_config=config)
    assert RankLoader(worker, parameters, str(tmp_path), is_loaded=True).load_check is None


def parameter(rows: int, columns: int = 4) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(rows, columns), requires_grad=False)


def test_adjacent_parts_are_viewed_as_a_block():
    data = np.arange(24, dtype=np.float32)
    # Two arrays, as in a bucket: separate storages.
    parts = [torch.from_dlpack(data[:8]).view(2, 4), torch.from_dlpack(data[8:]).view(4, 4)]
    block = view_as_block(parts, torch.empty(6, 4))
    assert block is not None
    assert block.data_ptr() == data.ctypes.data
    assert block.tolist() == data.reshape(6, 4).tolist()


MEMORY = torch.zeros(8, 4)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([MEMORY[2:6], MEMORY[:2]], id="in another order"),
        pytest.param([MEMORY[:2], MEMORY[3:7]], id="with a gap"),
        pytest.param([MEMORY[:2], MEMORY[2:5]], id="with a row too few"),
        pytest.param([MEMORY[:6].double()], id="of another dtype"),
        pytest.param([torch.zeros(4, 6).t()], id="with strides"),
        pytest.param([torch.zeros(6, 4, device="meta")], id="on another device"),
    ],
)
def test_parts_that_do_not_form_the_parameter_are_not_viewed(parts: list[torch.Tensor]):
    assert view_as_block(parts, torch.empty(6, 4)) is None


def test_a_view_copies_nothing_and_is_never_written():
    bound = BoundParameter(target := parameter(6), ("q", "k"))
    first = torch.arange(24.0).view(6, 4)
    expected = first.clone()
    assert bound.set_parts([first[:2], first[2:]]) == 0
    assert target.data_ptr() == first.data_ptr()
    second = -torch.arange(24.0).view(6, 4)
    assert bound.set_parts([second[:2].clone(), second[2:].clone()]) == 6 * 4 * 4
    assert torch.equal(target, second)
    assert torch.equal(first, expected)


def test_copies_reuse_their_memory_and_views_keep_theirs_alive():
    bound = BoundParameter(target := parameter(6), ("q", "k"))
    parts = [torch.ones(2, 4), torch.ones(4, 4)]
    bound.set_parts(parts)
    address = target.data_ptr()
    bound.set_parts([2 * part for part in parts])
    assert target.data_ptr() == address
    memory = torch.full((6, 4), 3.0)
    bound.set_parts([memory[:2], memory[2:]])
    del memory
    torch.full((6, 4), 9.0)  # would reuse freed memory
    assert target.tolist() == [[3.0] * 4] * 6


def test_a_copied_embedding_is_padded_with_zeros_and_a_view_is_not():
    bound = BoundParameter(target := parameter(8), ("embed",))
    for value in (1.0, 2.0):
        assert bound.set_parts([torch.full((4, 5), value).t()]) == 5 * 4 * 4
        assert target.tolist() == [[value] * 4] * 5 + [[0.0] * 4] * 3
    assert bound.set_parts([torch.full((5, 4), 3.0)]) == 0
    assert target.tolist() == [[3.0] * 4] * 5


def test_target_views_write_into_own_memory_also_after_a_view():
    bound = BoundParameter(target := parameter(6), ("q", "k"))
    viewed = torch.ones(6, 4)
    bound.set_parts([viewed[:2], viewed[2:]])
    for value, rows in zip((2.0, 3.0), bound.list_targets([2, 4]), strict=True):
        rows.fill_(value)
    assert target.tolist() == [[2.0] * 4] * 2 + [[3.0] * 4] * 4
    assert viewed.eq(1).all()


@pytest.mark.parametrize(
    ("shapes", "local", "dim", "heads", "boxes"),
    [
        ({"o": (6, 8)}, (6, 4), 1, None, ["[0:6, 4:8]"]),
        ({"gate": (8, 3), "up": (8, 3)}, (8, 3), 0, None, ["[4:8, 0:3]", "[4:8, 0:3]"]),
        # Both ranks have the only key-value head.
        (
            {"q": (8, 3), "k": (2, 3), "v": (2, 3)},
            (8, 3),
            0,
            1,
            ["[4:8, 0:3]", *["[0:2, 0:3]"] * 2],
        ),
        ({"q": (8, 3), "k": (2, 3)}, (8, 3), 0, 1, None),
        ({"q": (8, 4)}, (4, 3), 0, None, None),
        ({"q": (7, 3)}, (4, 3), 0, None, None),
        # vLLM's parameter has more dimensions than the checkpoint's.
        ({"q": (8, 4)}, (4, 1, 4), 2, None, None),
    ],
)
def test_a_rank_of_two_has_its_part_of_each_checkpoint_parameter(
    shapes: dict[str, tuple[int, ...]],
    local: tuple[int, ...],
    dim: int,
    heads: int | None,
    boxes: list[str] | None,
):
    pieces = _match_split(torch.zeros(local), [*shapes.items()], dim, heads, (1, 2))
    found = None if pieces is None else [str(box) for _, box, _ in pieces]
    assert found == boxes


@pytest.mark.parametrize("dtype", filter(_has_onednn_kernel, [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("shape", [(8,), (1, 8), (0, 8), (2, 3, 8)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_onednn_linear_equals_torch(dtype: torch.dtype, shape: tuple[int, ...], has_bias: bool):
    x = torch.randn(shape, generator=torch.manual_seed(1)).to(dtype)
    weight, bias = torch.randn(5, 8).to(dtype), torch.randn(5).to(dtype)
    actual = onednn_linear(x, weight, bias if has_bias else None)
    expected = torch.nn.functional.linear(x, weight, bias if has_bias else None)
    torch.testing.assert_close(
        actual, expected, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-5
    )


@pytest.mark.parametrize("shape", [(64, 96), (MIN_ONEDNN_ELEMENTS // 512, 512)])
def test_a_row_of_a_linear_layer_does_not_depend_on_the_rows_beside_it(shape: tuple[int, int]):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(shape, generator=torch.manual_seed(1)))
    vars(layer)["cpu_linear"] = None  # as vLLM marks its linear layers
    choose_linears(layer)
    x, linear = torch.randn(50, shape[1]), vars(layer)["cpu_linear"]
    whole = linear(x, layer.weight, None)
    for rows in range(1, 50):
        assert torch.equal(linear(x[:rows], layer.weight, None), whole[:rows])
