"""Legacy pickles: plain values and tensors are loaded, anything else is rejected."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from streamrl.engines.checkpoint.legacy_pickles import load_plain_pickle
from streamrl.engines.training.trainer_checkpoint import load_legacy_progress
from streamrl.errors import CheckpointError
from tests.hostile_pickle import Hostile


@pytest.mark.parametrize("kind", ["zip", "pickle", "empty", "noise"])
def test_a_hostile_pickle_is_neither_loaded_nor_recommended(tmp_path: Path, kind: str):
    path, hostile = tmp_path / "rank_0.pt", Hostile(tmp_path / "harmed")
    if kind == "zip":
        torch.save(hostile, path)
    else:
        content = {"pickle": pickle.dumps(hostile), "empty": b"", "noise": b"PK\x03\x04noise"}
        path.write_bytes(content[kind])
    with pytest.raises(CheckpointError, match="neither loaded nor executed") as refused:
        load_plain_pickle(path)
    assert "weights_only" not in str(refused.value) and "\n" not in str(refused.value)
    assert str(path) in str(refused.value) and not (tmp_path / "harmed").exists()


def test_a_pipe_in_place_of_a_file_is_rejected(tmp_path: Path):
    os.mkfifo(tmp_path / "rank_0.pt")
    with pytest.raises(CheckpointError, match=r"rank_0\.pt: not a regular file"):
        load_plain_pickle(tmp_path / "rank_0.pt")


@pytest.mark.parametrize("value", [{}, [], {"layout": 1, "num_updates": 2}])
def test_plain_values_of_another_format_are_rejected(tmp_path: Path, value: object):
    torch.save(value, tmp_path / "rank_0.pt")
    with pytest.raises(CheckpointError, match="not a trainer's state of the old format"):
        load_legacy_progress(tmp_path / "rank_0.pt")
