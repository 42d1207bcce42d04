"""`streamrl algorithms`: every spec with its columns, functions, defaults and paper."""

import json

import pytest

from streamrl.algorithms import ALGORITHMS
from streamrl.cli.main import main


def read_output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["algorithms", *words]) == 0
    return capsys.readouterr().out


def test_every_algorithm_is_printed_with_its_spec(capsys):
    text = read_output(capsys)
    for row in ALGORITHMS.values():
        assert f"{row.name}: {row.paper}" in text
        assert row.advantages.__name__ in text
        assert row.token_loss.__name__ in text
    assert "defaults   clip_low=0.2 clip_high=0.28 dual_clip=null" in text
    assert "params     temperature_positive=1.0 temperature_negative=1.05" in text


def test_one_algorithm_by_name(capsys):
    text = read_output(capsys, "gpg")
    assert text.startswith("gpg: Chu et al. 2025, GPG, arXiv:2504.02546\n")
    assert "  scope      step: training waits for all groups of a step\n" in text
    assert text.count("arXiv") == 1


def test_json_contains_resolved_defaults(capsys):
    rows = json.loads(read_output(capsys, "--json"))
    assert list(rows) == list(ALGORITHMS)
    assert rows["reinforce_pp"]["defaults"]["whiten_advantages"] is True
    assert rows["reinforce_pp"]["scope"] == "step"
    assert rows["clip_cov"]["derived"] == {"chosen": "covariance_band"}
    assert rows["safe_rlhf"]["dials"] == {"lagrange": "cost_multiplier"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["gpo"], "streamrl: gpo: no such algorithm; the nearest algorithm is gspo\n"),
        (["--path", "nowhere.py"], "streamrl: algorithm.path=nowhere.py: no such file\n"),
    ],
)
def test_bad_input_is_a_one_line_error(capsys, words, line):
    assert main(["algorithms", *words]) == 2
    assert capsys.readouterr().err == line
