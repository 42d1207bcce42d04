"""Overrides of a resume: environments whose episodes lie in the run's queue."""

import pytest

from streamrl.config.resume_overrides import check_overrides
from streamrl.config.run_config import load_config
from streamrl.errors import ConfigError

NONE: list[str] = []
ONE = ["environment.path=/a.py"]
GUESS = ["environment.named.guess.path=/a.py"]
TWO = [*GUESS, "environment.named.other.path=/b.py"]


@pytest.fixture
def resume(tmp_path):
    """Check the overrides of a resume against those of the stored run."""
    path = tmp_path / "recipe.yaml"
    path.write_text("{model: {path: m}, data: {train: d}, rewards: [{kind: exact}]}")

    def check(before, after):
        stored, config = (load_config(path, words, skips_dry_run=True) for words in (before, after))
        check_overrides(stored, config, None)

    return check


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (NONE, NONE),
        (ONE, ["environment.path=/other.py"]),
        ([*ONE, "environment.max_samples=2"], [*ONE, "environment.max_samples=4"]),
        (GUESS, TWO),
        (TWO, [*GUESS, "environment.named.other={path: /c.py, options: {n: 1}}"]),
    ],
)
def test_a_resumed_run_may_change_environments_and_add_a_named_one(resume, before, after):
    resume(before, after)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            NONE,
            GUESS,
            "^environment.named.guess.path=/a.py: .* must keep environment={}, as groups",
        ),
        (
            ONE,
            [*ONE, "environment.max_samples=2"],
            "max_samples=2: a resumed run must keep it at 1",
        ),
        ([*ONE, "environment.max_samples=2"], ONE, "max_samples=1: .* must keep it above 1"),
        (ONE, NONE, "^environment={}: a resumed run must keep environment.path=/a.py, as groups"),
        (
            ONE,
            GUESS,
            "^environment.named.guess.path=/a.py: a resumed run must keep environment.path=/a.py,",
        ),
        (TWO, GUESS, "must keep environment.named.guess.path=/a.py, environment.named.other.path="),
    ],
)
def test_a_resumed_run_keeps_the_environments_that_its_queue_needs(resume, before, after, message):
    with pytest.raises(ConfigError, match=message):
        resume(before, after)
