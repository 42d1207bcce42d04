"""Atomic writes: a file is complete or unchanged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.files.atomic_write import sync_and_rename, write_atomic


def test_a_write_replaces_the_file_and_leaves_no_temporary(tmp_path: Path):
    path = tmp_path / "file.txt"
    for text in ("first", "sécond"):
        write_atomic(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["file.txt"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file.txt"
    write_atomic(path, "before")

    def refuse(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, "after")
    assert path.read_text() == "before"


def test_a_directory_is_synced_before_its_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    partial, final = tmp_path / "partial", tmp_path / "final"
    (partial / "inner").mkdir(parents=True)
    (partial / "inner" / "file").write_text("x")
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def recorded_fsync(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), final.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    sync_and_rename(partial, final)
    inside = {str(partial), str(partial / "inner"), str(partial / "inner" / "file")}
    assert {path for path, is_renamed in synced if not is_renamed} == inside
    assert [path for path, is_renamed in synced if is_renamed] == [str(tmp_path)]
    assert (final / "inner" / "file").read_text() == "x"


WITHOUT_SPACE = """
import resource, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from streamrl.files.atomic_write import wrap_checkpoint_errors
from streamrl.errors import NoSpaceError

folder = Path(sys.argv[1])
words = {f"token{i}": i for i in range(1000)}
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for write in (
    lambda: (folder / "plain").write_bytes(bytes(2000)),
    lambda: save_file({"a": np.zeros(1000)}, folder / "tensors"),
    lambda: Tokenizer(models.WordLevel(words, unk_token="token0")).save(f"{folder}/words"),
):
    try:
        with wrap_checkpoint_errors(folder):
            write()
    except NoSpaceError as error:
        print(error)
"""


def test_a_full_disk_is_recognized_in_any_librarys_error(tmp_path: Path):
    words = [sys.executable, "-c", WITHOUT_SPACE, str(tmp_path)]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == [f"{tmp_path} cannot be written: File too large"] * 3


def test_a_symlink_at_the_temporary_name_is_not_followed(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / ".file.txt.partial").symlink_to(precious)
    write_atomic(tmp_path / "file.txt", "text")
    assert (tmp_path / "file.txt").read_text() == "text" and precious.read_text() == "mine"
    os.mkfifo(tmp_path / ".file.txt.partial")
    write_atomic(tmp_path / "file.txt", "more")
    assert (tmp_path / "file.txt").read_text() == "more"
    assert sorted(os.listdir(tmp_path)) == ["file.txt", "precious"]
