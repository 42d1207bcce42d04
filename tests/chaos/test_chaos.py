"""A run survives the kill -9 of any of its actors. Shortened: `make test-chaos` plays all of it.

CHAOS_SEED=<n> chooses other moments.
"""

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.bench import INJECT, Bench
from tests.chaos.scenarios import ROLES, Scenario, short_scenarios

SEED = int(os.environ.get("CHAOS_SEED", "0"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("chaos"))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", short_scenarios(SEED), ids=lambda scenario: scenario.name)
def test_every_prompt_is_trained_once_whoever_is_killed(bench: Bench, scenario: Scenario) -> None:
    verdict = bench.play(scenario, beside_undisturbed=False)
    assert not verdict.problems, f"{scenario}, CHAOS_SEED={SEED}:\n" + "\n".join(verdict.problems)


def test_what_is_injected_does_nothing_by_itself_and_hides_no_other_sitecustomize(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')\n")
    script = "import sys; print([m for m in sys.modules if 'chaos' in m])"
    env = {**os.environ, "PYTHONPATH": f"{INJECT}{os.pathsep}{tmp_path}"}
    env.pop("STREAMRL_CHAOS", None)
    output = subprocess.check_output([sys.executable, "-c", script], env=env, text=True)
    assert output.splitlines() == ["the other one", "[]"]


@pytest.mark.parametrize("role", ROLES)
def test_what_is_wrapped_takes_what_it_took_before(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(INJECT)
    faults = importlib.import_module("chaos_faults")
    wrapped: list[tuple[Any, Callable[..., Any]]] = []

    def note(owner: Any, name: str, around: Callable[..., Any]) -> None:
        wrapped.append((getattr(owner, name), around))

    monkeypatch.setattr(faults, "wrap", note)
    monkeypatch.setattr(faults, "wrap_async", note)
    names = ("role", "moment", "actor", "passage", "delay_s", "run_dir", "marker", "stored")
    fault = faults.Fault({**dict.fromkeys(names), "role": role, "moment": "mid_fetch"})
    for module, patch in faults.PATCHES.items():
        patch(fault, importlib.import_module(module))
    assert len(wrapped) > 10
    for original, around in wrapped:
        # Once by their places, as far as that goes, and once by their names.
        own = inspect.signature(original).parameters.values()
        placed = [p for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        named = {p.name: None for p in own if p.kind is p.KEYWORD_ONLY}
        inspect.signature(around).bind(original, *placed, **named)
