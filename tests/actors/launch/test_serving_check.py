"""Verdict of vLLM's probe as a run takes it: none is a note, a refusal ends the run."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.actors.launch import serving_check
from streamrl.actors.launch.serving_check import probe_serving
from streamrl.config.run_config import load_config
from streamrl.errors import ConfigError
from tests.actors.fakes import RECIPE


@pytest.fixture
def probe_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a shell script as the probe and returns the run's note."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    def probe(script: str) -> str:
        def start(*_: object) -> subprocess.Popen[str]:
            return subprocess.Popen(
                ["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True, text=True
            )

        monkeypatch.setattr(serving_check, "start_script", start)
        config = load_config(RECIPE, [f"model.path={tmp_path}"])
        generator = replace(config.generator, start_timeout_s=0.5)
        with probe_serving(replace(config, generator=generator), 64) as check:
            return check()

    return probe


def test_a_served_model_has_no_note_and_a_probe_without_a_verdict_has_one(probe_with):
    assert probe_with("""echo '""'""") == ""
    assert probe_with("exit 3").endswith("exit code 3")
    assert probe_with("sleep 600").endswith("generator.start_timeout_s=0.5")


def test_a_model_that_vllm_does_not_serve_is_refused(probe_with):
    with pytest.raises(ConfigError, match=r"vLLM does not serve it .*: no kernel"):
        probe_with("""echo '"no kernel"'""")
