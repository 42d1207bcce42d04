"""`streamrl config`: the reference of config keys is complete and equal to the docs page."""

from pathlib import Path

import pytest

from streamrl.cli.config import format_markdown, list_config_keys
from streamrl.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_docs_list_every_config_key():
    """Regenerate the tables with `streamrl config --markdown` after changing a key."""
    assert PAGE.read_text().rstrip().endswith(format_markdown(list(list_config_keys())))


def test_every_config_key_has_a_meaning():
    assert [key.name for key in list_config_keys() if not key.meaning] == []


def test_a_named_key_or_section_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "trainer.lr"]) == 0
    assert capsys.readouterr().out.startswith("trainer.lr: float [1.0e-06]\n")
    assert main(["config", "rewards"]) == 0
    names = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line[:1] != " "]
    assert {name.split(".")[0] for name in names if name} == {"rewards[]"}


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("filter.low", "filter.low: float [0.0]"),
        ("filter.function", "filter.function: text [required]"),
        ("critic.trainer.lr", "critic.trainer.lr: float [1.0e-05]"),
        ("critic.trainer.world_size", "critic.trainer.world_size: int [trainer.world_size]"),
    ],
)
def test_filter_options_and_trainer_settings_of_the_critic_are_keys(
    key: str, line: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["config", key]) == 0
    assert capsys.readouterr().out.splitlines()[0] == line


def test_an_unknown_key_names_the_nearest_key(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "trainer.lrr"]) == 2
    assert (
        "trainer.lrr: no such config key; the nearest key is trainer.lr" in capsys.readouterr().err
    )
