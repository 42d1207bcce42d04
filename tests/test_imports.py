"""Imports of each process: imports dominate the start time of a run, and an unneeded library costs
about a second."""

import json
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from streamrl.actors.launch.fork_server import SINGLE_THREAD_ENV
from streamrl.config.run_config import load_config
from tests.engines.tiny_qwen import save, tiny_model
from tests.planner.calibration.runs import play, recipe, write_run

ROOT = Path(__file__).parents[1]


def find_loaded_modules(program: str, *names: str) -> list[str]:
    """Run a program in a fresh interpreter; return the named modules that it loaded."""
    print_loaded = (
        f"import json, sys\nprint(json.dumps([n for n in {names!r} if n in sys.modules]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program) + print_loaded],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return list(json.loads(process.stdout.splitlines()[-1]))


def test_a_histogram_is_logged_to_wandb_without_pandas(tmp_path: Path):
    program = f"""
        from pathlib import Path
        from streamrl.telemetry.metric_names import Histogram
        from streamrl.telemetry.config import WandbConfig
        from streamrl.telemetry.wandb_sink import WandbSink
        sink = WandbSink(Path({str(tmp_path)!r}), WandbConfig(), run_name="demo")
        sink.start({{}})
        histogram = Histogram.from_integer_counts({{0: 2}})
        sink.log_step(1, {{"reward/mean": 0.5, "staleness/histogram": histogram}})
        sink.close({{}})
    """
    assert find_loaded_modules(program, "wandb", "pandas") == ["wandb"]


@pytest.mark.slow
def test_a_step_of_deepspeed_loads_no_compiler(tmp_path: Path):
    path = save(tiny_model(tied=True, seed=0), tmp_path)
    program = f"""
        import torch
        import torch.distributed as dist
        from streamrl.actors.transport.ray_calls import find_rendezvous
        from streamrl.engines.training.training_backend import DeepSpeedBackend
        from streamrl.engines.models.forward import load_model
        from streamrl.engines.trainer_config import TrainerConfig
        _, port = find_rendezvous()
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{{port}}", rank=0, world_size=1)
        module = load_model({path!r}, dtype=torch.float32)
        backend = DeepSpeedBackend(module, TrainerConfig())
        backend.backward(backend.forward(input_ids=torch.ones(1, 4).long()).logits.sum())
        backend.update(divisor=1.0, lr=1e-3)
        backend.close()
    """
    assert find_loaded_modules(program, "deepspeed", "torch._inductor.compile_fx") == ["deepspeed"]


ACTORS = ("coordination.coordinator", "generator", "replica", "queue_shard", "trainer")
NO_TORCH = (
    # A process with an actor handle loads the actor's class.
    *(f"streamrl.actors.{name}" for name in (*ACTORS, "engine_factory")),
    *(
        "streamrl.algorithms",
        "streamrl.buffer.shard",
        "streamrl.config.run_config",
        "streamrl.planner.to_planner_problem",
    ),
    *(
        "streamrl.resharding",
        "streamrl.planner.simulator",
        "streamrl.telemetry.sinks",
        "streamrl.weights",
    ),
    *("streamrl.cli", "streamrl.cli.main", "streamrl.cli.plan", "streamrl.cli.simulate"),
)


def test_processes_without_computation_load_no_torch():
    program = f"""
        import importlib, sys
        for name in {NO_TORCH!r}:
            importlib.import_module(name)
            heavy = {{"torch", "transformers", "scipy"}} & sys.modules.keys()
            assert not heavy, f"{{name}} loads {{heavy}}"
    """
    assert find_loaded_modules(program, "torch") == []


def test_coordinator_reads_a_config_without_torch(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{path: {tmp_path}}}\ndata: {{train: rows.jsonl}}\n"
        "rewards: [{kind: exact}]\ncosts: [{kind: length}]\n"
        "algorithm: {name: safe_rlhf, kl_coef: 0.1, kl_target: 0.1}\n"
    )
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(load_config(recipe)))
    program = f"""
        import os, pickle
        os.environ |= {SINGLE_THREAD_ENV!r}
        from pathlib import Path
        import numpy as np
        import streamrl.actors.coordination.coordinator
        assert len(os.listdir("/proc/self/task")) == 1, "the fork server could not fork it"
        from streamrl.algorithms.adaptive_params import AdaptiveParams
        from streamrl.algorithms.math.training_metrics import summarize_critic, summarize_policy
        from streamrl.data.prompt_stream import PromptStream
        from streamrl.config.role_counts import assign_slots
        config = pickle.loads(Path({str(tmp_path)!r}, "config.pickle").read_bytes())
        dials = AdaptiveParams(config.algorithm.spec, config.algorithm_settings)
        sums = {{"num_sampled": 8.0, "score_sum": 1.0, "cost_sum": 1.0, "kl_ref_sum": 0.5}}
        dials.update_after_step(sums | {{"included": 2.0}})
        assert dials.values
        config.algorithm_settings.compute_loss_denominator({{}}), summarize_policy({{}}, 0.0)
        summarize_critic({{}}, "critic")
        config.dataflow, config.get_trainer_config("critic"), assign_slots(config)
    """
    assert find_loaded_modules(program, "torch", "transformers") == []


def test_rule_based_rewards_load_no_torch(tmp_path: Path):
    path = save(tiny_model(tied=True, seed=0), tmp_path)
    program = f"""
        import streamrl.actors.replica
        from streamrl.data.chat_template import load_tokenizer
        from streamrl.rewards.interface.config import RewardConfig, ScorerConfig
        from streamrl.rewards.interface.reward import RewardContext
        from streamrl.rewards.registry import build_rewards
        from streamrl.rewards.interface.config import SandboxConfig
        from streamrl.rewards.group_filter import FilterConfig, build_group_filter
        from streamrl.rewards.reward_scorer import RewardScorer
        from streamrl.telemetry.config import RolloutConfig
        rewards = build_rewards(
            [RewardConfig(kind="exact")], RewardContext(ScorerConfig(), SandboxConfig())
        )
        tokenizer, accept = load_tokenizer({path!r}), build_group_filter(FilterConfig())
        RewardScorer(rewards, tokenizer, accept, RolloutConfig())
    """
    assert find_loaded_modules(program, "torch", "transformers") == ["transformers"]


def test_a_process_of_an_environment_loads_no_library_of_a_run(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    def step(self, reply): pass\n")
    program = f"""
        from streamrl.environments.config import EnvironmentConfig
        from streamrl.environments.hosts.environment_host import EnvironmentHost
        EnvironmentHost(EnvironmentConfig({str(path)!r}))
    """
    libraries = ("torch", "transformers", "ray", "pydantic", "jsonschema", "omegaconf", "regex")
    assert find_loaded_modules(program, *libraries) == []


def test_the_help_of_every_command_and_doctor_load_no_library_of_a_run():
    program = """
        import contextlib, io
        from streamrl.cli.main import COMMANDS, main
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for command in COMMANDS:
                try:
                    main([command, "--help"])
                except SystemExit as ended:
                    assert ended.code == 0
            main(["doctor"])
        assert printed.getvalue().count("usage: streamrl") == len(COMMANDS)
        assert "would run" in printed.getvalue()
    """
    # Doctor needs torch to inspect a GPU.
    allowed = ["torch"] if any(Path("/dev").glob("nvidia*")) else []
    libraries = ("torch", "scipy", "transformers", "ray", "deepspeed", "vllm")
    assert set(find_loaded_modules(program, *libraries)) <= set(allowed)


def test_report_loads_no_torch(tmp_path: Path):
    """The run validated its algorithm at the start, so that a report needs no torch."""
    config = recipe(tmp_path)
    run_dir = write_run(tmp_path / "run", config, play(config))
    program = f"""
        from streamrl.cli.main import main
        assert main(["report", {str(run_dir)!r}]) == 0
        assert main(["report", "--ledger", {str(run_dir)!r}]) == 0
    """
    assert find_loaded_modules(program, "torch", "scipy", "transformers", "ray") == []


def test_plan_and_simulate_with_given_sizes_load_no_transformers(tmp_path: Path):
    """Torch is loaded to validate the algorithm on a synthetic step."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{path: {tmp_path}}}\ndata: {{train: rows.jsonl}}\nrewards: [{{kind: exact}}]\n"
    )
    program = f"""
        from streamrl.cli.main import main
        words = [{str(recipe)!r}, "--cluster", "2xA100", "--json"]
        words += ["--model", "qwen2.5-0.5b", "--prompt-tokens", "9"]
        assert main(["simulate", *words]) == 0
        assert main(["plan", *words, "--proposals", "9"]) == 0
    """
    libraries = ("transformers", "ray", "deepspeed", "vllm", "peft")
    assert find_loaded_modules(program, "torch", *libraries) == ["torch"]


def test_driver_checks_a_model_without_its_model_class(tmp_path: Path):
    path = save(tiny_model(tied=True, seed=0, kv_heads=2), tmp_path)
    program = f"""
        import streamrl.actors.launch.driver
        import streamrl.cli.run_setup.training
        import streamrl.config.preflight
        from streamrl.data.chat_template import load_tokenizer
        from streamrl.engines.trainer_config import TrainerConfig
        from streamrl.engines.models.tensor_parallel_support import check_generator_split
        from streamrl.engines.models.tensor_parallel_support import check_trainer_split
        from streamrl.files.hf_config import read_model_length, read_vocab_size
        load_tokenizer({path!r}), read_vocab_size({path!r}), read_model_length({path!r}, limit=None)
        check_generator_split({path!r}, 1)
        split = TrainerConfig(backend="torch", world_size=2, tensor_parallel=2)
        check_trainer_split({path!r}, split)
    """
    classes = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")
    assert find_loaded_modules(program, "torch", "torch._dynamo", *classes) == ["torch"]
