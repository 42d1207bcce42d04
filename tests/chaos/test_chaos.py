"""A run survives the kill -9 of any of its actors; `make test-chaos` runs all scenarios.

CHAOS_SEED=<n> chooses other fault points.
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

from streamrl.config.run_config import load_config
from tests.chaos.bench import INJECT, Bench
from tests.chaos.scenarios import HOST, ROLES, Scenario, all_scenarios, short_scenarios

SEED = int(os.environ.get("CHAOS_SEED", "0"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("chaos"))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", short_scenarios(SEED), ids=lambda scenario: scenario.name)
def test_after_a_kill_every_prompt_is_trained_once(bench: Bench, scenario: Scenario):
    result = bench.run_scenario(scenario, with_baseline=False)
    assert not result.problems, f"{scenario}, CHAOS_SEED={SEED}:\n" + "\n".join(result.problems)


def test_a_run_accepts_the_settings_of_every_scenario():
    for scenario in all_scenarios(SEED):
        words = [f"{key}={value}" for key, value in scenario.settings.items()]
        load_config(Path("configs/grpo_arithmetic.yaml"), words)


def test_the_injected_sitecustomize_is_idle_without_a_plan_and_runs_the_hidden_one(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("print('hidden')\n")
    script = "import sys; print([m for m in sys.modules if 'chaos' in m])"
    env = {**os.environ, "PYTHONPATH": f"{INJECT}{os.pathsep}{tmp_path}"}
    env.pop("STREAMRL_CHAOS", None)
    output = subprocess.check_output([sys.executable, "-c", script], env=env, text=True)
    assert output.splitlines() == ["hidden", "[]"]


@pytest.mark.parametrize("role", [*ROLES, HOST])
def test_faults_keep_the_signatures_they_wrap(role: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(INJECT)
    faults = importlib.import_module("chaos_faults")
    wrapped: list[tuple[Any, Callable[..., Any]]] = []

    def note(owner: Any, name: str, around: Callable[..., Any]) -> None:
        wrapped.append((getattr(owner, name), around))

    monkeypatch.setattr(faults, "wrap", note)
    monkeypatch.setattr(faults, "wrap_async", note)
    names = ("role", "point", "actor", "hit", "delay_s", "run_dir", "marker", "stored")
    fault = faults.PlannedFault({**dict.fromkeys(names), "role": role})
    for module, patch in faults.PATCHES.items():
        patch(fault, importlib.import_module(module))
    assert len(wrapped) > 10
    for original, around in wrapped:
        parameters = inspect.signature(original).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [p for p in parameters if p.kind in kinds]
        keywords = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
        inspect.signature(around).bind(original, *positional, **keywords)
