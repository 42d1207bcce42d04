"""What a process loads: imports are most of the time in which a run starts, and a library that
nobody there needs is a second of it."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.engines.tiny_qwen import save, tiny_model

ROOT = Path(__file__).parents[1]


def loaded(program: str, *names: str) -> list[str]:
    """Those of the modules that a fresh interpreter has loaded after a program."""
    tell = f"import json, sys\nprint(json.dumps([n for n in {names!r} if n in sys.modules]))"
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program) + tell],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return list(json.loads(found.stdout.splitlines()[-1]))


def test_a_histogram_is_logged_to_wandb_without_pandas(tmp_path: Path) -> None:
    program = f"""
        from pathlib import Path
        from streamrl.telemetry.contract import Histogram
        from streamrl.telemetry.wandb_sink import WandbConfig, WandbSink
        sink = WandbSink(Path({str(tmp_path)!r}), WandbConfig(), run_name="demo")
        sink.start({{}})
        sink.step(1, {{"reward/mean": 0.5, "staleness/histogram": Histogram.of_integers({{0: 2}})}})
        sink.close({{}})
    """
    assert loaded(program, "wandb", "pandas") == ["wandb"]


def test_a_step_of_deepspeed_loads_no_compiler(tmp_path: Path) -> None:
    path = save(tiny_model(tied=True, seed=0), tmp_path)
    program = f"""
        import torch
        import torch.distributed as dist
        from streamrl.actors.meeting_place import meeting_place
        from streamrl.engines.deepspeed_backend import DeepSpeedBackend
        from streamrl.engines.forward import load_model
        from streamrl.engines.trainer_config import TrainerConfig
        _, port = meeting_place()
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{{port}}", rank=0, world_size=1)
        module = load_model({path!r}, dtype=torch.float32)
        backend = DeepSpeedBackend(module, TrainerConfig())
        backend.backward(backend.forward(input_ids=torch.ones(1, 4).long()).logits.sum())
        backend.step(divisor=1.0, lr=1e-3)
        backend.close()
    """
    assert loaded(program, "deepspeed", "torch._inductor.compile_fx") == ["deepspeed"]
