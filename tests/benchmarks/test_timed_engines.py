"""Engines of benchmarks that take a set time and compute nothing."""

import re
from pathlib import Path

from benchmarks.timed_engines import _TimedTrainer
from streamrl.actors import trainer


def test_the_timed_trainer_overrides_what_a_trainer_actor_uses():
    """A method of the real trainer would fail for lack of a model."""
    assert trainer.__file__ is not None
    used = set(re.findall(r"self\._model\.(\w+)", Path(trainer.__file__).read_text()))
    assert len(used) > 10
    assert used <= vars(_TimedTrainer).keys()
