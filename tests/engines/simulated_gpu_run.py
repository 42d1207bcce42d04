"""Trainers, losses, weights and resharding on a simulated GPU, in a process of its own.

Measurements by area, among them the largest differences from a run on the CPU, and what planted
faults raised or changed. Run by `tests.engines.simulated_gpu_lines`.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from scripts.gpu_check import (
    compare_losses,
    hide_gpu,
    list_picks,
    make_policy_task,
    make_shard_storage,
    make_tiny_groups,
    write_tiny,
)
from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.correction import CorrectionConfig
from streamrl.algorithms.math.advantages import make_token_rewards
from streamrl.algorithms.math.correction import second_moment_limit
from streamrl.algorithms.math.losses import covariance_band_mask, covariance_top_mask
from streamrl.data.pretrain_texts import TextStream
from streamrl.distributed.devices import get_local_device
from streamrl.engines.checkpoint import sharded_state
from streamrl.engines.checkpoint.sharded_state import save_tensors
from streamrl.engines.models.forward import DEFAULT_OPTIONS, ModelLoadOptions, TokenScores
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training import model_trainer
from streamrl.engines.training.ema_reference import EmaReference
from streamrl.engines.training.model_trainer import ModelTrainer
from streamrl.engines.training.pretraining import PretrainingLoss
from streamrl.engines.training.tasks import (
    CriticTask,
    PolicyTask,
    SampleJoiner,
    TrainingTask,
    TwoHeadedTask,
)
from streamrl.messages import Columns
from streamrl.weights.buckets import publish_version, unpack_tensors
from streamrl.weights.parameters import MergedWeights
from tests.engines import simulated_gpu_ranks, simulated_gpu_weights
from tests.engines.reward_ranks import compute_on_rank
from tests.engines.scoring_models import make_reference, make_shadow_critic
from tests.engines.simulated_gpu_ranks import use_simulated_accelerator
from tests.engines.tiny_families import make_model
from tests.engines.tiny_groups import make_groups
from tests.engines.tiny_qwen import save, tiny_model
from tests.simulated_gpu import (
    CPU,
    GPU_0,
    GpuModule,
    MixedDevicesError,
    SimulatedGpu,
    SimulatedStream,
    StreamCall,
    use_gloo_as_nccl,
    use_simulated_gpu,
)
from tests.weights.local_transport import LocalReader, LocalWriter

LAYERS = 5
"""Layers of the model whose offload is watched."""
Measurements = dict[str, Any]
Groups = Mapping[str, Columns]


def make_task(kind: str, path: str, groups: Groups) -> TrainingTask:
    if kind in ("policy", "lora"):
        near = CorrectionConfig(second_moment_threshold=0.04)
        return make_policy_task(path, AlgorithmConfig(name="grpo", correction=near), groups)
    policy = make_policy_task(path, AlgorithmConfig(name="ppo"), groups)
    if kind == "critic, lora":
        return CriticTask(path, policy.spec, policy.settings, 0.2)
    return TwoHeadedTask(path, policy.spec, policy.settings, 1.0, value_clip=0.2)


def make_trainer(kind: str, path: str, groups: Groups) -> ModelTrainer:
    config = TrainerConfig(
        backend="torch", dtype="float32", lora_rank=2 if "lora" in kind else 0, lr=1e-3
    )
    return ModelTrainer(make_task(kind, path, groups), config=config)


def train_with_deepspeed(path: str, groups: Groups) -> Measurements:
    """Train two steps in bfloat16 with ZeRO 1, the default on GPUs; leaves DeepSpeed's patches."""
    use_simulated_accelerator()
    config = TrainerConfig(backend="deepspeed", zero_stage=1, dtype="bfloat16", lr=1e-3)
    trainer = ModelTrainer(make_task("policy", path, groups), config=config)
    first, copies = train_step(trainer, groups)
    trainer.offload_optimizer()
    second, _ = train_step(trainer, groups)
    devices = {tensor.device.type for _, tensor in trainer.full_state()}
    # AdamW's step counters, without dimensions, are on the CPU.
    state = trainer._backend.iter_optimizer_state()
    devices |= {tensor.device.type for tensor in state if tensor.dim()}
    trainer.close()
    return {
        "norms": [numbers["policy/grad_norm"] for numbers in (first, second)],
        "devices": sorted(devices),
        "host_copies": copies,
    }


def train_step(trainer: ModelTrainer, groups: Groups) -> tuple[dict[str, float], list[int]]:
    """Train a step; return its numbers, and the copies to the CPU in each micro-batch."""
    picks, numbers, copies = list_picks(groups), dict[str, float](), list[int]()
    trainer.plan_step(groups)
    if isinstance(trainer._task, PolicyTask):
        trainer.precompute_logprobs(groups, picks)
        trainer.sync_plan()
    denominator = 0.0
    for half in (picks[::2], picks[1::2]):
        before = SimulatedGpu.host_copies
        sums = trainer.train_micro_batch(groups, half)
        copies.append(SimulatedGpu.host_copies - before)
        denominator += trainer.compute_loss_denominator(sums)
        numbers |= {f"{half[0]}/{name}": value for name, value in sums.items()}
    return numbers | trainer.update(denominator), copies


def train(kind: str, path: str, groups: Groups) -> Measurements:
    """Train two steps; the optimizer is offloaded between them."""
    trainer = make_trainer(kind, path, groups)
    first, copies = train_step(trainer, groups)
    trainer.offload_optimizer()
    second, _ = train_step(trainer, groups)
    parameters = {name: tensor.cpu() for name, tensor in trainer.full_state()}
    trainer.close()
    numbers = {f"{step}/{n}": v for step, ns in enumerate((first, second)) for n, v in ns.items()}
    return {"numbers": numbers, "parameters": parameters, "host_copies": copies}


def compare_training(kind: str, path: str, groups: Groups) -> Measurements:
    on_gpu = train(kind, path, groups)
    with hide_gpu():
        on_cpu = train(kind, path, groups)
    expected = on_cpu["numbers"]
    assert on_gpu["numbers"].keys() == expected.keys()
    return {
        "numbers": max(
            abs(value - expected[name]) / max(1.0, abs(expected[name]))
            for name, value in on_gpu["numbers"].items()
            if "log_ratio_bin" not in name
        ),
        "parameters": find_max_difference(on_gpu["parameters"], on_cpu["parameters"]),
        "host_copies": on_gpu["host_copies"],
    }


def find_max_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(float((actual[n].cpu() - expected[n].cpu()).abs().max()) for n in expected)


def score(path: str, groups: Groups, options: ModelLoadOptions = DEFAULT_OPTIONS) -> dict[str, Any]:
    (columns, *_) = groups.values()
    policy, critic = (
        make_reference(path, options=options),
        make_shadow_critic(path, options=options),
    )
    torch.nn.init.ones_(critic._backend.module.score.weight)
    places = {name: p.device.type for name, p in policy._backend.module.named_parameters()}
    logprobs, values = (
        model.compute_columns([columns], name, micro_batch_tokens=128)[0]
        for model, name in ((policy, "ref_logprobs"), (critic, "values"))
    )
    policy.close()
    return {
        "logprobs": torch.from_numpy(logprobs),
        "values": torch.from_numpy(values),
        "layers": sorted({place for name, place in places.items() if ".layers." in name}),
        "others": sorted({place for name, place in places.items() if ".layers." not in name}),
    }


def compare_scores(path: str, groups: Groups) -> Measurements:
    """Score on the GPU, with layers in host memory, and on the CPU."""
    offloaded = score(path, groups, ModelLoadOptions(keeps_layers_on_host=True))
    on_gpu = score(path, groups)
    with hide_gpu():
        on_cpu = score(path, groups)
    differences = [
        find_max_difference({n: scores[n] for n in names}, {n: on_cpu[n] for n in names})
        for names in [("logprobs", "values")]
        for scores in (on_gpu, offloaded)
    ]
    return {"difference": max(differences), **{n: offloaded[n] for n in ("layers", "others")}}


def watch_offload() -> Measurements:
    """Score micro-batches with layers in host memory, on streams whose calls are recorded.

    Then load other weights. Returns whether log-probabilities equal those of a model on the GPU;
    the calls of the stream that computes; copies (c) and layers (l) as the host queued them; and
    the most layers whose memory existed at once on the GPU.
    """
    newer = dict(tiny_model(tied=False, seed=2, layers=LAYERS).named_parameters())
    columns = make_groups(num_groups=1, group_size=6)["0:0:0"]
    with tempfile.TemporaryDirectory() as folder:
        path = save(tiny_model(tied=False, seed=1, layers=LAYERS), Path(folder))
        scorers = [
            make_reference(
                path, temperature=1.0, options=ModelLoadOptions(keeps_layers_on_host=keeps_layers)
            )
            for keeps_layers in (False, True)
        ]
    stream, num_resident = GpuModule.in_use.stream, list[int]()

    def note_layer(*_: object) -> None:
        stream.note("compute", None)
        copies = (call.subject for call in SimulatedStream.calls if call.action == "copy")
        num_resident.append(sum(memory() is not None for memory in copies))

    for layer in scorers[1]._backend.module.model.layers:
        layer.register_forward_pre_hook(note_layer)
    scores, calls = list[Any](), list[StreamCall]()
    for version in range(2):
        for scorer in scorers:
            SimulatedStream.calls.clear()
            scores += scorer.compute_columns([columns], "ref_logprobs", micro_batch_tokens=64)
            calls += SimulatedStream.calls if not version else ()
            scorer.copy_weights(newer)
    return {
        "equal": [bool((scores[i] == scores[i + 1]).all()) for i in (0, 2)],
        "is_updated": bool((scores[1] != scores[3]).any()),
        "compute stream": [call.action for call in calls if call.stream is stream],
        "layers": LAYERS,
        "queued": "".join({"copy": "c", "compute": "l"}.get(call.action, "") for call in calls),
        "released": list_released(calls, stream),
        "resident": max(num_resident),
    }


def list_released(calls: list[StreamCall], compute_stream: SimulatedStream) -> list[int]:
    """Return for each copy how many layers have computed at the last event that it waits for."""
    computed, at_event, waited, result = 0, dict[int, int](), 0, list[int]()
    for call in calls:
        if call.action == "compute":
            computed += 1
        elif call.stream is compute_stream and call.action == "record":
            at_event[id(call.subject)] = computed
        elif call.action == "wait" and call.stream is not compute_stream:
            waited = max(waited, at_event.get(id(call.subject), 0))
        elif call.action == "copy":
            result.append(waited)
    return result


def publish_and_pull(path: str, groups: Groups, kind: str = "policy") -> Measurements:
    """Publish a trainer's weights, load them into a scorer, compare its parameters.

    The copies are those of the third version: until then memory on the host may be given up.
    """
    trainer = make_trainer(kind, path, groups)
    scorer = make_reference(path, temperature=1.0)
    writer, reader = LocalWriter(), LocalReader()
    for version in range(3):
        train_step(trainer, groups)
        before, bytes_before = SimulatedGpu.host_copies, SimulatedGpu.host_bytes
        waits_before = GpuModule.num_waits
        manifest = publish_version(
            trainer.full_state(), version=version, bucket_bytes=1 << 14, writer=writer
        )
        published, waits = SimulatedGpu.host_copies, GpuModule.num_waits - waits_before
        tensors = unpack_tensors(manifest, reader.fetch_buckets(manifest))
        full = scorer.build_full(tensors)
        scorer.copy_weights(full)
    merged = full.merged_names if isinstance(full, MergedWeights) else ()
    merged_on = sorted({full[name].device.type for name in merged})
    pulled, host_bytes = SimulatedGpu.host_copies, SimulatedGpu.host_bytes - bytes_before
    names = {slot.name for bucket in manifest.buckets for slot in bucket.slots}
    state = {name: tensor.cpu() for name, tensor in trainer.merged_state()}
    loaded = dict(scorer._backend.module.named_parameters())
    trainer.close()
    return {
        "tensors": len(names),
        "merged on": merged_on,
        "publish_copies": published - before,
        "publish_waits": waits,
        "pull_copies": pulled - published,
        "host_bytes": host_bytes,
        "tensor_bytes": sum(slot.num_bytes for b in manifest.buckets for slot in b.slots),
        "devices": sorted({parameter.device.type for parameter in loaded.values()}),
        "difference": find_max_difference({name: loaded[name].detach() for name in state}, state),
    }


def reshard(
    path: str,
    groups: Groups,
    place: Callable[[int], torch.device] = lambda index: get_local_device(),
) -> Measurements:
    """Write a trainer's weights into served tensors, each on the device `place` of its number."""
    trainer = make_trainer("policy", path, groups)
    state = dict(trainer.full_state())
    served = {
        name: torch.zeros(tensor.shape, device=place(index))
        for index, (name, tensor) in enumerate(state.items())
    }
    before = SimulatedGpu.host_copies
    stats = trainer.reshard_to_generator(make_shard_storage(served), 3)
    copies = SimulatedGpu.host_copies - before
    result: Measurements = {"is_planned": stats is not None, "host_copies": copies}
    if stats is not None:
        result["difference"] = find_max_difference(served, state)
    trainer.close()
    return result


def compare_maths(path: str, groups: Groups) -> Measurements:
    """Call pure functions with tensors on the GPU, and on the CPU."""
    generator = torch.Generator().manual_seed(0)
    logprobs, old = (torch.randn(6, 20, generator=generator) for _ in range(2))
    mask = torch.arange(20) < torch.tensor([20, 5, 9, 14, 3, 20])[:, None]
    calls: dict[str, Callable[..., Any]] = {
        "token rewards": lambda values, mask: make_token_rewards(values[:, 0], mask),
        "drawn": choose_drawn,
        "top": lambda values, mask: covariance_top_mask(values, values, mask, fraction=0.3),
        "second moment": lambda values, mask: torch.tensor(
            second_moment_limit(values[mask].square(), threshold=0.9)
        ),
        "samples": lambda values, mask: join_samples(values),
    }
    arguments = (logprobs + old, mask)
    on_gpu = {name: call(*(a.to(GPU_0) for a in arguments)) for name, call in calls.items()}
    on_cpu = {name: call(*arguments) for name, call in calls.items()}
    numbers = [{n: float(t.double().sum()) for n, t in r.items()} for r in (on_gpu, on_cpu)]
    return {"difference": max(abs(numbers[0][n] - numbers[1][n]) for n in calls)}


def choose_drawn(values: Tensor, mask: Tensor) -> Tensor:
    """Choose half of the tokens by draws of the function itself; return how many."""
    draw = partial(covariance_band_mask, values, values, mask, low=-9.0, high=9.0, fraction=0.5)
    return draw().sum()


def join_samples(values: Tensor) -> Tensor:
    return SampleJoiner(torch.tensor([0, 0, 1, 2, 2, 2]).to(values.device))(values)


def compare_rewards(path: str, groups: Groups) -> Measurements:
    """Compute logits of a reward model."""
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(path, num_labels=1, pad_token_id=0)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        rows = [[5, 6, 7], [8, 9, 10, 11, 12]]
        (on_gpu,) = compute_on_rank(0, 0, folder, {}, [rows])
        with hide_gpu():
            (on_cpu,) = compute_on_rank(0, 0, folder, {}, [rows])
    return {"difference": max(abs(a - b) for a, b in zip(on_gpu, on_cpu, strict=True))}


def compare_windows(path: str, groups: Groups) -> Measurements:
    """Score packed rows that are longer than the sliding window of a model."""
    columns = make_groups(num_groups=1, group_size=3)["0:0:0"]
    with tempfile.TemporaryDirectory() as folder:
        make_model("mistral", sliding_window=4).save_pretrained(folder)
        scores = []
        for context in (nullcontext(), hide_gpu()):
            with context:
                model = make_reference(folder)
                scores += model.compute_columns([columns], "ref_logprobs", micro_batch_tokens=64)
    return {"difference": float(np.abs(scores[0] - scores[1]).max())}


def save_experts(path: str, groups: Groups) -> Measurements:
    """Save a mixture, whose router has a buffer."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("deepseek_v3", n_group=1, topk_group=1)
        path = save(model, Path(folder, "policy"))
        trainer = make_trainer("policy", path, groups)
        with note_written() as written:
            trainer.save_model(Path(folder, "model"))
        saved, trained = (
            load_file(Path(folder, name, "model.safetensors")) for name in ("model", "policy")
        )
        trainer.close()
    buffers = [name for name in saved if "bias" in name]
    difference = find_max_difference(saved, trained)
    return {"buffers": len(buffers), "difference": difference, "written": sorted(written)}


# --- Planted faults -------------------------------------------------------------------------------


@contextmanager
def leave_on_cpu(column: str) -> Iterator[None]:
    """Plant a fault: a column of the batch stays on the CPU."""
    compute = PolicyTask.compute_loss_from_scores

    def compute_with_fault(
        task: PolicyTask, scores: TokenScores, columns: Mapping[str, Tensor], *, version: int
    ) -> Any:
        return compute(task, scores, {**columns, column: columns[column].cpu()}, version=version)

    with mock.patch.object(PolicyTask, "compute_loss_from_scores", compute_with_fault):
        yield


def name_fault(run: Callable[[], object]) -> str:
    """Return the error that a planted fault raises."""
    try:
        run()
    except MixedDevicesError as error:
        dist.destroy_process_group()
        return str(error)
    return "no error"


def save_and_continue(path: str, groups: Groups) -> Measurements:
    """Train, save, train on; repeat that from the checkpoint. Compare with the same on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = save(tiny_model(tied=True, seed=0), Path(folder))  # with a tokenizer
        groups = make_groups()
        on_gpu = save_and_repeat(path, groups)
        critic = make_trainer("critic, lora", path, groups)  # has a head without adapters
        written = {*on_gpu["written"], *(t.device.type for _, t in critic.merged_state())}
        critic.close()
        with hide_gpu():
            on_cpu = save_and_repeat(path, groups)
    return {
        "repeats": on_gpu["repeats"],
        "written": sorted(written),
        **{
            name: find_max_difference(on_gpu[name], on_cpu[name])
            for name in ("parameters", "saved model", "EMA reference", "logprobs")
        },
    }


@contextmanager
def note_written() -> Iterator[set[str]]:
    """Context that notes the devices of the tensors that are written into files."""
    written = set[str]()

    def save(path: Path, tensors: Mapping[str, Tensor], *facts: dict[str, str]) -> None:
        written.update(tensor.device.type for tensor in tensors.values())
        save_tensors(path, tensors, *facts)

    with (
        mock.patch.object(sharded_state, "save_tensors", save),
        mock.patch.object(model_trainer, "save_tensors", save),
    ):
        yield written


def save_and_repeat(path: str, groups: Groups) -> Measurements:
    trainer, reference, parameters = make_trainer("lora", path, groups), EmaReference(0.5), []
    with (
        tempfile.TemporaryDirectory() as name,
        note_written() as written,
    ):
        folder = Path(name)
        train_step(trainer, groups)
        trainer.save_training_state(folder / "state")
        for _ in range(2):
            train_step(trainer, groups)
            parameters.append({n: t.cpu().clone() for n, t in trainer.full_state()})
            reference.update_from_policy(trainer.full_state(), moves=True)
            trainer.close()
            trainer = make_trainer("lora", path, groups)
            trainer.load_training_state(folder / "state")
        trainer.save_model(folder / "model")
        written.update(tensor.device.type for _, tensor in trainer.merged_state())
        saved = load_file(folder / "model" / "model.safetensors")
    logprobs = trainer.compute_token_logprobs(np.arange(3, 19, dtype=np.int32))
    trainer.close()
    first, again = parameters
    return {
        "repeats": all(first[name].equal(again[name]) for name in first),
        "written": sorted({*written, *(t.device.type for _, t in reference.named_tensors())}),
        "parameters": again,
        "saved model": saved,
        "EMA reference": dict(reference.named_tensors()),
        "logprobs": {"": torch.from_numpy(logprobs)},
    }


def compare_pretraining(path: str, groups: Groups) -> Measurements:
    """Add the loss of pretraining texts, of a model with a tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        path = save(tiny_model(tied=True, seed=0), Path(folder))
        on_gpu = pretrain(path)
        with hide_gpu():
            on_cpu = pretrain(path)
    return {name: abs(on_gpu[name] / on_cpu[name] - 1) for name in on_cpu}


def pretrain(path: str) -> dict[str, float]:
    groups = make_groups()
    texts = PretrainingLoss(
        TextStream(["t4 t5 t6 t7", "t8 t9 t40"], seed=0),
        PreTrainedTokenizerFast.from_pretrained(path),
        coef=1.0,
        num_texts=2,
        max_tokens=8,
        micro_batch_tokens=16,
    )
    task = make_policy_task(path, AlgorithmConfig(), groups)
    config = TrainerConfig(backend="torch", dtype="float32")
    trainer = ModelTrainer(task, config=config, pretraining=texts)
    trainer.train_micro_batch(groups, list_picks(groups))
    metrics = trainer.update(16.0)
    trainer.close()
    return {name: metrics[name] for name in ("loss/ptx", "policy/grad_norm")}


def plant_batch_fault(path: str, groups: Groups) -> str:
    with mock.patch.object(model_trainer, "get_local_device", lambda: CPU):
        return name_fault(partial(train, "policy", path, groups))


def plant_column_fault(path: str, groups: Groups) -> str:
    with leave_on_cpu("generator_logprobs"):
        return name_fault(partial(train, "policy", path, groups))


AREAS: Mapping[str, Callable[[str, Groups], Any]] = {
    "losses": partial(compare_losses, dtype="float32", variants={"plain": {}}),
    "scores": compare_scores,
    "offload": lambda path, groups: watch_offload(),
    **{kind: partial(compare_training, kind) for kind in ("lora", "two heads")},
    "checkpoint": save_and_continue,
    "pretraining": compare_pretraining,
    "weights": publish_and_pull,
    "adapters": partial(publish_and_pull, kind="lora"),
    "resharding": reshard,
    "served on the CPU": partial(reshard, place=lambda _: CPU),
    "batch on the CPU": plant_batch_fault,
    "column on the CPU": plant_column_fault,
    "deepspeed": train_with_deepspeed,
    "maths": compare_maths,
    "reward model": compare_rewards,
    "sliding window": compare_windows,
    "experts": save_experts,
    **simulated_gpu_ranks.AREAS,
    **simulated_gpu_weights.AREAS,
}


@contextmanager
def prepare_areas() -> Iterator[tuple[str, Groups]]:
    """Context with the simulated GPU; return a model's directory and groups for `AREAS`."""
    with (
        use_simulated_gpu(),
        use_gloo_as_nccl(),
        tempfile.TemporaryDirectory() as folder,
    ):
        path = write_tiny(Path(folder))
        yield path, make_tiny_groups(path)
