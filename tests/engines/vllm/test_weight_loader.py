"""Parameters as views of what they were given, and as copies of it; no engine in here."""

import numpy as np
import pytest
import torch

from streamrl.engines.vllm.weight_loader import (
    BoundParameter,
    list_source_names,
    onednn_linear,
    view_as_block,
)

MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def parameter(rows: int, columns: int = 4) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(rows, columns), requires_grad=False)


def test_a_merged_parameter_has_the_names_of_its_parts_in_order() -> None:
    names = list_source_names("model.layers.1.self_attn.qkv_proj.bias", MERGED)
    parent = "model.layers.1.self_attn"
    assert names == (f"{parent}.q_proj.bias", f"{parent}.k_proj.bias", f"{parent}.v_proj.bias")
    assert list_source_names("model.norm.weight", MERGED) == ("model.norm.weight",)


def test_parts_that_follow_each_other_are_seen_as_one() -> None:
    data = np.arange(24, dtype=np.float32)
    # Of two arrays, as a bucket gives them: no storage in common.
    parts = [torch.from_dlpack(data[:8]).view(2, 4), torch.from_dlpack(data[8:]).view(4, 4)]
    block = view_as_block(parts, torch.empty(6, 4))
    assert block is not None
    assert block.data_ptr() == data.ctypes.data
    assert block.tolist() == data.reshape(6, 4).tolist()


@pytest.mark.parametrize(
    "parts",
    [
        [(2, 6), (0, 2)],
        [(0, 2), (3, 7)],
        [(0, 2), (2, 5)],
    ],
    ids=["in another order", "with a gap", "with a row too few"],
)
def test_other_parts_are_not(parts: list[tuple[int, int]]) -> None:
    memory = torch.zeros(8, 4)
    assert view_as_block([memory[a:b] for a, b in parts], torch.empty(6, 4)) is None


def test_neither_are_parts_of_another_type_or_with_strides() -> None:
    assert view_as_block([torch.zeros(6, 4, dtype=torch.float64)], torch.empty(6, 4)) is None
    assert view_as_block([torch.zeros(4, 6).t()], torch.empty(6, 4)) is None
    assert view_as_block([torch.zeros(6, 4, device="meta")], torch.empty(6, 4)) is None


def test_a_view_copies_nothing_and_is_never_written_to() -> None:
    bound = BoundParameter(target := parameter(6), ("q", "k"))
    first = torch.arange(24.0).view(6, 4)
    expected = first.clone()
    assert bound.load_parts([first[:2], first[2:]]) == 0
    assert target.data_ptr() == first.data_ptr()
    second = -torch.arange(24.0).view(6, 4)
    assert bound.load_parts([second[:2].clone(), second[2:].clone()]) == 6 * 4 * 4
    assert torch.equal(target, second)
    assert torch.equal(first, expected)


def test_copies_share_one_place_and_views_live_as_long_as_they_are_seen() -> None:
    bound = BoundParameter(target := parameter(6), ("q", "k"))
    apart = [torch.ones(2, 4), torch.ones(4, 4)]
    bound.load_parts(apart)
    place = target.data_ptr()
    bound.load_parts([2 * part for part in apart])
    assert target.data_ptr() == place
    memory = torch.full((6, 4), 3.0)
    bound.load_parts([memory[:2], memory[2:]])
    del memory
    torch.full((6, 4), 9.0)  # would take the place of what is gone
    assert target.tolist() == [[3.0] * 4] * 6


def test_a_copied_embedding_keeps_zeros_behind_its_rows_and_a_view_has_none() -> None:
    bound = BoundParameter(target := parameter(8), ("embed",))
    assert bound.has_matching_shapes({"embed": (5, 4)})
    for value in (1.0, 2.0):
        assert bound.load_parts([torch.full((4, 5), value).t()]) == 5 * 4 * 4
        assert target.tolist() == [[value] * 4] * 5 + [[0.0] * 4] * 3
    assert bound.load_parts([torch.full((5, 4), 3.0)]) == 0
    assert target.tolist() == [[3.0] * 4] * 5


def test_others_may_fill_a_parameter_in_its_own_memory_also_after_it_was_a_view() -> None:
    bound = BoundParameter(target := parameter(6), ("q", "k"))
    viewed = torch.ones(6, 4)
    bound.load_parts([viewed[:2], viewed[2:]])
    shapes = {"q": (2, 4), "k": (4, 4)}
    for name, rows in bound.list_targets(shapes):
        rows.fill_(2.0 if name == "q" else 3.0)
    assert target.tolist() == [[2.0] * 4] * 2 + [[3.0] * 4] * 4
    assert viewed.eq(1).all()


@pytest.mark.parametrize(
    ("shapes", "fits"),
    [
        ({"q": (2, 4), "k": (4, 4)}, True),
        ({"q": (2, 4), "k": (3, 4)}, False),
        ({"q": (2, 5), "k": (4, 5)}, False),
        ({"q": (6, 4)}, False),
    ],
)
def test_parts_fit_by_name_and_shape(shapes: dict[str, tuple[int, ...]], fits: bool) -> None:
    assert BoundParameter(parameter(6), ("q", "k")).has_matching_shapes(shapes) is fits


def test_a_parameter_is_held_against_what_was_read() -> None:
    bound = BoundParameter(target := parameter(6), ("q", "k"))
    target.data.copy_(torch.arange(24.0).view(6, 4))
    stored = torch.arange(24.0, dtype=torch.float64).view(6, 4)
    assert bound.has_equal_values([stored[:2], stored[2:]])
    assert not bound.has_equal_values([stored[4:], stored[:4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8,), (1, 8), (0, 8), (2, 3, 8)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_onednn_multiplies_as_torch_does(
    dtype: torch.dtype, shape: tuple[int, ...], has_bias: bool
) -> None:
    x = torch.randn(shape, generator=torch.manual_seed(1)).to(dtype)
    weight, bias = torch.randn(5, 8).to(dtype), torch.randn(5).to(dtype)
    found = onednn_linear(x, weight, bias if has_bias else None)
    expected = torch.nn.functional.linear(x, weight, bias if has_bias else None)
    torch.testing.assert_close(
        found, expected, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-5
    )
