"""Import of vLLM in a process that serves calls meanwhile."""

import sys
import threading
from pathlib import Path

import pytest

from streamrl.engines import vllm
from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.engines.vllm.requests import EngineSpec, import_vllm
from streamrl.errors import ConfigError, DeadlineError

SPEC = EngineSpec("model", GeneratorConfig(), 64)


async def test_an_import_blocks_no_event_loop_and_has_the_deadline_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(vllm, "__path__", [str(tmp_path)])
    (tmp_path / "quick.py").write_text("import threading\nthread = threading.get_ident()")
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.3)")
    assert (await import_vllm("quick", SPEC)).thread != threading.get_ident()
    hurried = EngineSpec("model", GeneratorConfig(start_timeout_s=0.05), 64)
    with pytest.raises(DeadlineError, match=r"did not start model within 0\.05 s"):
        await import_vllm("slow", hurried)


async def test_an_engine_whose_vllm_cannot_be_imported_is_an_error_of_the_config(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, "streamrl.engines.vllm.engine", None)
    with pytest.raises(ConfigError, match=r"^generator: vLLM cannot start model: import of"):
        await GenerationEngine.start(SPEC)


def test_on_a_cpu_vllm_compiles_nothing_and_has_the_configured_threads():
    environment = make_vllm_env("cpu", threads=2)
    assert (environment["OMP_NUM_THREADS"], environment["TORCHDYNAMO_DISABLE"]) == ("2", "1")
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
