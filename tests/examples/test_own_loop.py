"""Loops of one's own, on real engines: what they learn is what a run learns."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from examples.own_loop import command_line
from examples.own_loop.command_line import LoopFunction, Step, iter_steps
from examples.own_loop.grpo import SETTINGS as GRPO_SETTINGS
from examples.own_loop.grpo import grpo
from examples.own_loop.ppo import ppo
from examples.own_loop.remax import remax
from examples.own_loop.safe_rlhf import safe_rlhf
from streamrl.actors.launch.fork_server import start_fork_server, stop_fork_server
from streamrl.actors.launch.ray_cluster import connect_cluster
from streamrl.cli.main import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from streamrl.config.preflight import check_worker_memory, prepare_run
from streamrl.config.run_config import RunConfig, load_config, with_settings
from streamrl.dataflow import CRITIC
from streamrl.errors import ConfigError, StreamError
from streamrl.own_loops import PROTOCOLS, Batch, WorkerContext, WorkerMesh, transfers
from streamrl.own_loops.loop import OwnLoop
from streamrl.own_loops.model_workers import (
    CriticWorker,
    PolicyWorker,
    make_loop_config,
    set_world_size,
)
from streamrl.own_loops.worker_group import ResourcePool, WorkerGroup
from streamrl.placement.config import PlacementConfig
from streamrl.resharding.grids import RankGrid
from streamrl.run_dir.checkpoint import read_checkpoint
from tests.e2e.launched import Launched
from tests.e2e.shared_runs import PPO_ODD, Ended, make_builds

# With the run that the loops are compared with.
pytestmark = pytest.mark.xdist_group("ppo")

CONFIGS = Path("configs")
SLOTS = 2
KV_MB = 256
MB = 1 << 20
PAGE = Path("examples/own_loop/README.md")
PPO = CONFIGS / "ppo_arithmetic.yaml"
ODD = ["run.steps=3", *PPO_ODD]
LEARNED = ("loss/policy", "loss/value", "policy/grad_norm", "critic/grad_norm", "policy/kl_ref")


@pytest.fixture(scope="module")
def pool() -> Iterator[ResourcePool]:
    make_builds([PPO])
    start_fork_server()
    with connect_cluster(PlacementConfig(cpus=SLOTS, object_store_mb=200)):
        yield ResourcePool(SLOTS, groups=8)
    stop_fork_server()


class Narrow:
    """A pool of which only the first slots are used."""

    def __init__(self, pool: ResourcePool, slots: int) -> None:
        self.slots = slots
        self.acquire_slot, self.release_slot = pool.acquire_slot, pool.release_slot
        self.begin_turn, self.takes_turns = pool.begin_turn, pool.takes_turns
        self.is_closed = False


def play(
    function: LoopFunction, config: RunConfig, pool: Any, folder: Path | None = None
) -> list[Mapping[str, float]]:
    """The figures of every step; checkpoints are below the folder, if any is given."""
    with TemporaryDirectory() as other:
        config = with_settings(config, {"run.dir": str(folder or other)})
        return list(iter_steps(function, OwnLoop(config, pool, prepare_run(config))))


class Watched(PolicyWorker):
    """Tells what it holds of its optimizer while it does not train."""

    @transfers("TO_ALL_FROM_FIRST")
    def update_policy(self, batch: Batch) -> dict[str, float]:
        figures = super().update_policy(batch)
        backend = self._trainer.model._backend
        state = [
            tensor.untyped_storage() for tensor in backend.iter_optimizer_state() if tensor.dim()
        ]
        # Nobody can have the memory of parameters that are among it.
        kept = {tensor.untyped_storage().data_ptr() for _, tensor, _ in backend.iter_shards()}
        held = sum(storage.nbytes() for storage in state if storage.data_ptr() not in kept)
        return {**figures, "optimizer_bytes": float(held)}


class FailingPolicy(PolicyWorker):
    """Policy worker that fails in the middle of each update."""

    @transfers("TO_ALL_FROM_FIRST")
    def fail(self, batch: Batch) -> None:
        self._loop.run(self._train_next_version(batch, {}))

    async def _train_batch(self, batch: Batch, adaptive_params: Mapping[str, float]) -> Any:
        raise StreamError("no gradient")


def on_a_budget(overrides: list[str], *, workers: int) -> RunConfig:
    """PPO's settings, within the least that its workers can do with."""
    config = load_config(PPO, [*overrides, f"generator.kv_cache_mb={KV_MB}"])
    held = check_worker_memory(make_loop_config(config, workers), on_gpu=False)
    assert held is not None
    budget_mb = -(-(held.generate_bytes - held.optimizer) // MB)
    return replace(config, placement=replace(config.placement, memory_mb=budget_mb))


def assert_kept(steps: list[Mapping[str, float]]) -> None:
    """The KV cache is gone while a step is trained, and the optimizer's state while none is."""
    trained = [step for step in steps if "loss/policy" in step]
    assert trained
    for step in trained:
        assert step["memory/generate_mb"] - step["memory/train_mb"] > KV_MB / 2
        assert step["optimizer_bytes"] == 0


def select_exact(step: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that do not depend on the machine."""
    return {name: x for name, x in step.items() if not name.startswith(("time/", "memory/"))}


def assert_alike(found: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    assert found["reward/mean"] == pytest.approx(wanted["reward/mean"], abs=1e-9)
    learned = [name for name in LEARNED if name in found]
    for name in learned:
        assert found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-7), name
    assert "loss/value" in learned


def ppo_saved(folder: Path) -> LoopFunction:
    """PPO, whose policy is saved after its second step."""

    def function(loop: OwnLoop) -> Iterator[Step]:
        for step in ppo(loop):
            yield step
            if loop.step == 2:
                loop.groups[0].save_model(folder).get()

    return function


@pytest.fixture(scope="module")
def alone(
    pool: ResourcePool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Mapping[str, float]], Path]:
    """What PPO learns where one worker has all parameters, on a budget, and the policy then."""
    folder = tmp_path_factory.mktemp("alone") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.own_loop.ppo.PolicyWorker", Watched)
        return play(ppo_saved(folder), on_a_budget(ODD, workers=1), Narrow(pool, 1)), folder


def test_ppo_with_one_worker_learns_what_a_run_learns(
    alone: tuple[list[Mapping[str, float]], Path], ppo_run: Ended
):
    steps, _ = alone
    assert_kept(steps)
    assert len(steps) == 3
    for mine, row in zip(steps, ppo_run.rows, strict=False):
        assert_alike(mine, row)
        assert mine["weights/bytes"] == mine["weights/copied_bytes"] == 0
    assert ["loss/policy" in step for step in steps] == [False, True, True]


@pytest.mark.slow
def test_ppo_with_two_workers_learns_the_same(
    pool: ResourcePool,
    alone: tuple[list[Mapping[str, float]], Path],
    ppo_run: Ended,
    monkeypatch: pytest.MonkeyPatch,
):
    config = load_config(PPO, ODD)
    monkeypatch.setattr("examples.own_loop.ppo.PolicyWorker", Watched)
    both = play(ppo, config, pool)
    assert both[-1]["optimizer_bytes"] > MB
    assert both[-1]["memory/train_mb"] > both[-1]["memory/generate_mb"] - KV_MB / 2
    for one, other, row in zip(alone[0], both, ppo_run.rows[:3], strict=True):
        assert_alike(one, other)
        assert_alike(other, row)
        for name in ("weights/bytes", "weights/copied_bytes"):
            assert one[name] == other[name] == 0
    assert ["loss/policy" in step for step in both] == [False, True, True]


SPLIT = {
    "tensor parallel, and the reference by FSDP2": [
        *["trainer.backend=torch", "trainer.tensor_parallel=2", "reference.world_size=2"],
    ],
    "sharded by deepspeed, on a budget": ["trainer.zero_stage=3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLIT)
def test_workers_that_hold_a_model_together_learn_the_same(
    pool: ResourcePool,
    alone: tuple[list[Mapping[str, float]], Path],
    split: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("examples.own_loop.ppo.PolicyWorker", Watched)
    # Small micro-batches: the ranks have not as many of them, and go through the model in step.
    small = "pipeline.micro_batch_tokens=128"
    overrides = [*ODD, "run.steps=2", small, "trainer.world_size=2", *SPLIT[split]]
    is_bound = "on a budget" in split
    config = on_a_budget(overrides, workers=2) if is_bound else load_config(PPO, overrides)
    steps = play(ppo_saved(tmp_path), config, pool)
    if is_bound:
        assert_kept(steps)
    for one, other in zip(steps, alone[0][:2], strict=True):
        assert_alike(one, other)
        assert one["weights/bytes"] > 0
    found, wanted = (load_file(at / "model.safetensors") for at in (tmp_path, alone[1]))
    assert found.keys() == wanted.keys()
    for name in wanted:
        # An update moves a parameter by up to the learning rate, 1e-4, however small its gradient.
        assert_close(found[name], wanted[name], rtol=0.0, atol=2e-5)


@pytest.mark.slow
def test_generating_after_a_failed_update_raises(pool: ResourcePool):
    config = load_config(
        PPO, ["run.steps=1", "pipeline.groups_per_step=2", "critic.warmup_alone=0"]
    )
    loop = OwnLoop(config, Narrow(pool, 1), prepare_run(config))  # type: ignore[arg-type]
    policy = loop.start_group(FailingPolicy)
    (batch,) = loop.batches
    sampled = policy.generate_sequences(batch)
    with pytest.raises(StreamError, match="no gradient"):
        policy.fail(sampled).get()
    with pytest.raises(StreamError, match="the last update failed midway; the weights"):
        policy.fail(policy.generate_sequences(batch)).get()
    policy.close()


class Offloading(OwnLoop):
    """Loop whose policy offloads its optimizer and its KV cache at the end of each turn."""

    def start_group(self, worker: type, *arguments: object, **settings: Any) -> WorkerGroup:
        offloads = worker is PolicyWorker
        return super().start_group(worker, *arguments, **settings, offloads=offloads)


@pytest.mark.slow
def test_grpo_in_turns_learns_what_it_learns_at_once(
    pool: ResourcePool, monkeypatch: pytest.MonkeyPatch
):
    short = ["run.steps=3", "pipeline.groups_per_step=8", "checkpoint.at_end=false"]
    config = load_config(CONFIGS / "grpo_arithmetic.yaml", [*GRPO_SETTINGS, *short])
    at_once = play(grpo, config, Narrow(pool, 1))
    monkeypatch.setattr(pool, "takes_turns", True)
    monkeypatch.setattr("tests.examples.test_own_loop.OwnLoop", Offloading)
    in_turns = play(grpo, config, Narrow(pool, 1))
    assert [step["policy/grad_norm"] > 0 for step in at_once] == [True] * 3
    for one, other in zip(at_once, in_turns, strict=True):
        assert select_exact(one) == select_exact(other)


@pytest.mark.slow
def test_with_lora_the_policys_ranks_score_by_the_reference(pool: ResourcePool):
    lora = [*GRPO_SETTINGS, "run.steps=3", "pipeline.groups_per_step=8", "trainer.lora_rank=4"]
    num_groups: list[int] = []

    def watched(loop: OwnLoop) -> Iterator[Step]:
        for step in grpo(loop):
            num_groups.append(len(loop.groups))
            yield step

    # With a copy the reference is a model of its own.
    below, copied = (
        play(watched, load_config(CONFIGS / "grpo_arithmetic.yaml", [*lora, *copies]), pool)
        for copies in ([], ["reference.replicas=1"])
    )
    assert num_groups == [2] * 3 + [3] * 3
    assert below[-1]["policy/kl_ref"] > 1e-6
    for one, other in zip(below, copied, strict=True):
        assert select_exact(one) == select_exact(other)


@pytest.mark.slow
def test_remax_measures_rollouts_by_the_likeliest_completion(pool: ResourcePool):
    overrides = ["run.steps=2", "pipeline.groups_per_step=17", "algorithm.kl_coef=0.001"]
    first, second = play(remax, load_config(CONFIGS / "remax_arithmetic.yaml", overrides), pool)
    for step in (first, second):
        assert math.isfinite(step["loss/policy"]) and step["policy/grad_norm"] > 0
        assert step["weights/bytes"] == 0
    # The reference is what the policy was at the start.
    assert first["policy/kl_ref"] == pytest.approx(0.0, abs=1e-9)
    assert second["policy/kl_ref"] > 1e-6


@pytest.mark.slow
def test_safe_rlhf_turns_its_multiplier_by_the_costs(pool: ResourcePool):
    overrides = ["run.steps=2", "pipeline.groups_per_step=32", "critic.warmup_alone=0"]
    config = load_config(CONFIGS / "safe_rlhf_toy.yaml", overrides)
    first, second = play(safe_rlhf, config, Narrow(pool, 1))
    params = config.algorithm_settings.params
    excess = first["cost/mean"] - params["cost_limit"]
    assert first["dial/lagrange"] == params["lagrange"]
    turned = params["lagrange"] * math.exp(params["lagrange_lr"] * excess * params["lagrange"])
    assert second["dial/lagrange"] == pytest.approx(turned)
    for step in (first, second):
        assert step["weights/bytes"] == 0
        assert {"loss/policy", "loss/value", "loss/cost_value", "loss/ptx"} <= step.keys()


SHORT = ["run.steps=4", "pipeline.groups_per_step=16", "critic.warmup_alone=1", "run.name=own"]


def stop_after(step: int, function: LoopFunction) -> LoopFunction:
    """Return the loop, which is saved and ends after a step."""

    def stopping(loop: OwnLoop) -> Iterator[Step]:
        for replies in function(loop):
            yield replies
            if loop.step == step:
                loop.save_checkpoint()
                return

    return stopping


@pytest.fixture(scope="module")
def resumed(pool: ResourcePool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of PPO's four steps, `whole` in one go and `parts` in two, and of their figures."""
    folder, config = tmp_path_factory.mktemp("resumed"), load_config(PPO, SHORT)
    one = Narrow(pool, 1)
    runs = {
        "whole": [play(ppo, config, one, folder / "whole")],
        "parts": [
            play(stop_after(2, ppo), config, one, folder / "parts"),
            play(ppo, config, one, folder / "parts"),
        ],
    }
    steps = {name: [step for part in parts for step in part] for name, parts in runs.items()}
    (folder / "steps.json").write_text(json.dumps(steps))
    return folder


@pytest.mark.slow
def test_a_resumed_loop_equals_an_uninterrupted_one_bit_for_bit(resumed: Path):
    steps = json.loads((resumed / "steps.json").read_text())
    for one, other in zip(steps["whole"], steps["parts"], strict=True):
        assert select_exact(one) == select_exact(other)
    whole, parts = (
        read_checkpoint(resumed / name / "own/checkpoints/step_000004")
        for name in ("whole", "parts")
    )
    assert whole.state["versions"] == {"policy": 4, "critic": 4}
    assert whole.proofs == parts.proofs
    assert whole.state == parts.state


@pytest.mark.slow
def test_a_checkpoint_is_refused_if_it_is_damaged_or_of_another_loop(
    resumed: Path, pool: ResourcePool
):
    config = load_config(PPO, [*SHORT, f"run.dir={resumed / 'parts'}"])
    prepared = prepare_run(config)
    with closing(OwnLoop(config, pool, prepared)) as loop:
        with pytest.raises(ConfigError, match="step_000004: has a critic, policy, which this loop"):
            loop.load_checkpoint()
        with pytest.raises(ConfigError, match="own is in use: its run is alive"):
            OwnLoop(config, pool, prepared).load_checkpoint()
    seeded = with_settings(config, {"run.seed": 1})
    told = "cannot resume the data stream: the seed of the data order was 0"
    with (
        closing(OwnLoop(seeded, pool, prepare_run(seeded))) as loop,
        pytest.raises(ConfigError, match=told),
    ):
        loop.load_checkpoint()
    (file,) = (resumed / "parts").glob("own/checkpoints/step_000004/critic/trainer/rng_00000.*")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    told = r"step_000004: critic/trainer/rng_00000.*hash"
    with (
        closing(OwnLoop(config, pool, prepared)) as loop,
        pytest.raises(ConfigError, match=told),
    ):
        loop.load_checkpoint()


def test_checkpoints_need_a_run_directory_of_their_own(tmp_path: Path):
    config = load_config(PPO, [f"run.dir={tmp_path}"])
    loop = OwnLoop(config, None, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="save_checkpoint: call load_checkpoint once before"):
        loop.save_checkpoint()
    config.run_dir.mkdir()
    (config.run_dir / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"run: has a run of `streamrl train`; set run.dir or"):
        loop.load_checkpoint()


TENSOR_PARALLEL = ["trainer.tensor_parallel=2", "trainer.world_size=2", "--workers", "1"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--workers", "0"], "workers=0: must be at least 1"),
        (
            ["trainer.backend=torch", *TENSOR_PARALLEL],
            "trainer.tensor_parallel=2: must divide",
        ),
        (["placement.memory_mb=20"], "placement.memory_mb=20: to train, a worker holds "),
        (
            ["--config", "configs/grpo_arithmetic.yaml"],
            "algorithm.name=grpo: this is a loop of ppo",
        ),
        (
            ["filter.kind=equal_rewards", "algorithm.group_size=2"],
            "filter.kind=equal_rewards: an own loop filters no",
        ),
        (["environment.path=/a.py"], "environment.path=/a.py: an own loop samples single turns"),
        (["reference.every=2"], "reference.every=2: an own loop has a fixed reference"),
        (
            ["--workers", "1", "reference.world_size=2"],
            "reference.world_size=2: the loop has workers=1;",
        ),
        (
            ["reference.world_size=2", "reference.tensor_parallel=2"],
            "reference.tensor_parallel=2: an own loop gives",
        ),
        (
            ["rewards=[{kind: model, path: judge, world_size: 2}]"],
            "rewards[0].world_size=2: an own loop has whole ones; set 1",
        ),
        (["generator.tensor_parallel=2"], "generator.tensor_parallel=2: an own loop gen"),
        (["critic.replicas=1"], "critic.replicas=1: the script of an own loop starts scorers"),
        (["placement.mode=split"], "placement.mode=split: an own loop trains and"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["ppo", *words])
    with pytest.raises(SystemExit) as left:
        command_line.main(ppo, str(PPO), "critic.warmup_alone=2")
    assert left.value.code == EXIT_BAD_INPUT
    (said,) = capsys.readouterr().err.splitlines()
    assert told in said


def test_a_critic_has_as_many_ranks_as_its_group():
    config = load_config(PPO, ["critic.trainer.world_size=4"])
    assert set_world_size(config, 2).get_trainer_config(CRITIC).world_size == 2


def test_a_worker_refuses_a_gpu_without_kv_cache_mb_and_a_mesh_that_is_not_the_trainers(
    monkeypatch: pytest.MonkeyPatch,
):
    def seat(ranks: int) -> WorkerContext:
        return WorkerContext(0, WorkerMesh(RankGrid(1, 1, ranks).assign_ranks()), "localhost", 1)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"generator\.kv_cache_mb=null: must be set"):
        PolicyWorker(seat(1), load_config(PPO), 64)
    split = ["trainer.backend=torch", "trainer.world_size=2", "trainer.tensor_parallel=2"]
    told = r"trainer\.tensor_parallel=2: the mesh of the critic must be RankGrid\(1, 2, 1\)"
    with pytest.raises(ConfigError, match=told):
        CriticWorker(seat(2), load_config(PPO, split), 64)


def test_each_trained_group_has_the_mesh_of_its_own_trainer(monkeypatch: pytest.MonkeyPatch):
    meshes: list[WorkerMesh] = []
    monkeypatch.setattr(
        "streamrl.own_loops.loop.WorkerGroup", lambda *_, mesh, **__: meshes.append(mesh)
    )
    split = ["trainer.backend=torch", "trainer.world_size=2", "trainer.tensor_parallel=2"]
    config = load_config(PPO, [*split, "critic.trainer.tensor_parallel=1"])
    loop = OwnLoop(config, SimpleNamespace(slots=2), SimpleNamespace(max_length=64))  # type: ignore[arg-type]
    for worker in (PolicyWorker, CriticWorker):
        loop.start_group(worker)
    assert [mesh.train.tp_size for mesh in meshes] == [2, 1]


def test_the_page_has_every_protocol():
    assert re.findall(r"^\| `([A-Z_0-9]+)` \|", PAGE.read_text(), re.M) == list(PROTOCOLS)


def run_page(code: str, folder: Path) -> str:
    """Run code of the page in a folder of its own; return what it prints."""
    (folder / "page.py").write_text(code)
    run = Launched([], folder, {"PYTHONPATH": f"{folder}:{Path.cwd()}"}, module="page")
    assert run.wait(300.0) == 0, run.output
    return run.output


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path: Path):
    _, *parts = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.M)
    output = run_page("".join(parts), tmp_path)
    assert str({"text": ["a", "bb", "ccc"], "number": [101, 102, 103]}) in output
    assert str([{"rows": 2, "letters": 3}, {"rows": 1, "letters": 3}]) in output
    assert str({"text": ["a", "bb", "ccc"], "old": [101, 102, 103]}) in output


@pytest.mark.slow
def test_the_loop_of_the_page_runs_and_continues(tmp_path: Path):
    script, *_ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.M)
    recipe = PPO.read_text().replace("examples/", f"{Path.cwd()}/examples/")
    (tmp_path / "rl.yaml").write_text(recipe.replace("groups_per_step: 256", "groups_per_step: 8"))
    script = script.replace("rl.yaml", f"{tmp_path}/rl.yaml")
    for before, steps in ((0, 5), (5, 6)):
        settings = f"run.steps={steps}", f"run.dir={tmp_path}", "critic.warmup_alone=0"
        output = run_page(script.replace('"run.steps=20"', str(settings)[1:-1]), tmp_path)
        assert f"continues after step {before}\n" in output
        trained = re.findall(r"^(\d+) [\d.]+ [\d.]+$", output, re.M)
        assert trained == [str(step) for step in range(before + 1, steps + 1)]


@pytest.mark.slow
def test_an_interrupt_ends_a_loop_with_one_line(tmp_path: Path):
    words = ["--workers", "1", "pipeline.groups_per_step=16"]
    run = Launched(words, tmp_path, module="examples.own_loop.remax")
    run.until(lambda: "step   2" in run.output)
    run.interrupt()
    assert run.wait(60.0) == EXIT_INTERRUPTED
    assert run.output.splitlines()[-1] == "own_loop: interrupted"
    assert "Traceback" not in run.output
    assert run.orphans() == []
