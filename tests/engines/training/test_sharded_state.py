"""A trainer's state on disk: what a checkpoint holds, and refusals of files that are none."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from streamrl.engines.checkpoint.sharded_state import (
    MOMENT_KINDS,
    PROGRESS_FILE,
    VALUE_KIND,
    ParameterFragment,
    TrainerProgress,
    open_state,
    read_progress,
    restore_rng,
    save_rng,
    save_state,
)
from streamrl.errors import CheckpointError
from streamrl.resharding.layouts import create_whole_shard

WHOLE = [[[[0, 0], [2, 3], [0, 0]]], None]
"""The only box of a tensor [2, 3], stored as a whole."""


def test_a_shard_is_read_back_from_a_file_that_others_may_read(tmp_path: Path):
    (tmp_path / "other").touch()
    shard, parameter = create_whole_shard("w", (2, 3)), torch.arange(6.0)
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones(6)
    optimizer.step()
    assert save_state(tmp_path, 0, [ParameterFragment(shard, parameter)], optimizer) == 1
    expected = {VALUE_KIND: parameter, **{k: optimizer.state[parameter][k] for k in MOMENT_KINDS}}
    with open_state(tmp_path) as state:
        for kind, tensor in expected.items():
            target = torch.empty(6)
            state.fill_shard(kind, shard, target)
            assert torch.equal(target, tensor), kind
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1, modes


@pytest.mark.parametrize(
    ("shards", "reason"),
    [
        ({"v": [[2, 3], *WHOLE]}, "KeyError"),
        ({"w": [[3, 3], *WHOLE]}, "do not add up"),
        ({"w": [[2], [[[0], [2], [0]]], None]}, "not as many elements"),
        ({"w": [[2, 3], [[[0, 3], [2, 0], [0, 0]]], None]}, "start < stop"),
        ({"w": [[2, 3.5], *WHOLE]}, "Expected `int`"),
        ({"w": {"tensor": "w"}}, "Expected `array`"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_of_other_content_is_no_state(shards: Any, reason: str, tmp_path: Path):
    text = shards if isinstance(shards, str) else json.dumps(shards)
    save_file({"value/w": torch.zeros(6)}, tmp_path / "state_0.safetensors", {"shards": text})
    with (
        pytest.raises(CheckpointError, match=f"state_0.*not a trainer's state.*{reason}"),
        open_state(tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    "changed", [{"format": None}, {"format": 4}, {"step": -1}, {"num_updates": True}]
)
def test_progress_of_an_earlier_version_is_read_and_of_another_format_refused(
    changed: dict[str, Any], tmp_path: Path
):
    saved = {"format": 2, "layout": "one rank", "num_updates": 1, "step": 1}
    saved["adapters"] = "lora_rank=2 lora_alpha=4.0 lora_targets=[]"
    (tmp_path / PROGRESS_FILE).write_text(json.dumps(saved))
    assert read_progress(tmp_path) == TrainerProgress(2, 1, 1, "lora_rank=2 lora_alpha=4.0")
    left = {key: value for key, value in (saved | changed).items() if value is not None}
    (tmp_path / PROGRESS_FILE).write_text(json.dumps(left))
    with pytest.raises(CheckpointError, match=r"trainer\.json: cannot be read"):
        read_progress(tmp_path)


@pytest.mark.parametrize(
    "states",
    [{"gpu": torch.zeros(3)}, {"cpu": torch.zeros(3)}, {"cpu": torch.zeros(3, dtype=torch.uint8)}],
    ids=["missing", "dtype", "size"],
)
def test_a_damaged_state_of_random_numbers_is_refused(
    states: dict[str, torch.Tensor], tmp_path: Path
):
    save_rng(tmp_path, 0)
    expected = torch.rand(3)
    restore_rng(tmp_path, 0)
    assert torch.equal(torch.rand(3), expected)
    save_file(states, tmp_path / "rng_00000.safetensors")
    with pytest.raises(CheckpointError, match="not a state of torch's random numbers"):
        restore_rng(tmp_path, 0)
