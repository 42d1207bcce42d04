"""Files that a user names are read whole, if they are what they should be."""

from pathlib import Path

import pytest
import yaml

from streamrl.small_file import (
    LOADER,
    MOST_BYTES,
    read_small,
    read_small_json,
    read_small_yaml,
)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    return path


def test_yaml_is_read_by_the_loader_in_c_where_there_is_one(tmp_path: Path) -> None:
    assert yaml.__with_libyaml__ == (LOADER is yaml.CSafeLoader)
    assert read_small_yaml(written(tmp_path, "a: [1, two, 3.0]\n")) == {"a": [1, "two", 3.0]}


def test_aliases_that_would_stand_for_endless_text_are_refused(tmp_path: Path) -> None:
    levels = ["&l0 [x, x]", *(f"&l{i + 1} [*l{i}, *l{i}]" for i in range(99))]
    path = written(tmp_path, "".join(f"- {level}\n" for level in levels))
    with pytest.raises(ValueError, match=r"^\*l0: must be written out, no alias$"):
        read_small_yaml(path)


@pytest.mark.parametrize("text", ["- &a [*a]\n", "base: &b {x: 1}\nmore: {<<: *b}\n"])
def test_no_alias_is_read(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="no alias"):
        read_small_yaml(written(tmp_path, text))


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "a: [", "- \ud83d\t: }"])
def test_what_is_no_yaml_is_a_value_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ValueError):
        read_small_yaml(path)


def test_what_is_nested_too_deeply_as_json_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        read_small_json(written(tmp_path, "[" * 200_000))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than 1 MiB"):
        read_small(written(tmp_path, "x" * (MOST_BYTES + 1)))
