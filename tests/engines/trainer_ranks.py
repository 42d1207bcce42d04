"""Trainers in two child processes, as ranks of a trainer or each alone.

A trainer brings torch.distributed and DeepSpeed into its process, so none runs in pytest's. The
processes run many cases one after another and return the results.
"""

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerFast

from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.correction import CorrectionConfig
from streamrl.algorithms.math.training_metrics import compute_loss_denominator
from streamrl.buffer.micro_batch_schedule import MicroBatch, Round
from streamrl.data.pretrain_texts import TextStream
from streamrl.distributed.devices import get_local_device
from streamrl.engines.models import activation_checkpointing
from streamrl.engines.models.forward import load_model
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.model_trainer import ModelTrainer
from streamrl.engines.training.pretraining import PretrainingLoss
from streamrl.engines.training.tasks import CriticTask, PolicyTask, TrainingTask, TwoHeadedTask
from streamrl.errors import CheckpointError, StreamError
from streamrl.messages import Columns, columns_to_rollouts
from tests import forked
from tests.engines.tiny_groups import make_groups
from tests.engines.tiny_qwen import forward_logprobs
from tests.engines.trainer_layouts import CUTS, ONE, Layout

TEMPERATURE = 0.8
# Adam turns near-zero gradients (those of key biases) into steps of this size in a direction that
# is rounding: small enough to stay below the tests' tolerance of 1e-6.
LR = 1e-5
GROUPS = make_groups()
SECOND_MOMENT = 0.5
SEVERAL_LR = 1e-3
SEVERAL_DIVISOR = 16.0
ALGORITHM = AlgorithmConfig(kl_coef=0.1, entropy_coef=0.01)
SETTINGS = ALGORITHM.to_settings(max_length=8, reward_weights={})
# Several updates of decoupled PPO with the second moment mask and normalized weights.
SEVERAL = AlgorithmConfig(
    whiten_advantages=True,
    epochs=2,
    mini_batches=2,
    correction=CorrectionConfig(
        proximal="trainer",
        weights="token",
        normalize_weights=True,
        second_moment_threshold=SECOND_MOMENT,
    ),
)
TOP_ENTROPY = 0.4
LOOKING = AlgorithmConfig(
    name="otb",
    params={"top_entropy": TOP_ENTROPY},
    correction=CorrectionConfig(proximal="trainer", weights="token"),
)
PPO = AlgorithmConfig(name="ppo", whiten_advantages=False)
VALUE_CLIP = 0.05
VALUED: dict[str, Columns] = {
    uid: {**columns, "values": np.where(columns["loss_mask"], 0.1, 0).astype(np.float32)}
    for uid, columns in GROUPS.items()
}
"""GROUPS with the values of a critic that predicts 0.1 everywhere."""
NARROW = "narrow"
LORA: dict[str, Any] = {"lora_rank": 2, "lora_alpha": 3.0}
LATE_SAVE_S = 3.0
EQUAL_SCORES: dict[str, Columns] = {
    uid: {**columns, "scores": np.ones_like(columns["scores"])} for uid, columns in GROUPS.items()
}
"""GROUPS with equal scores, whose gradient is 0."""
TEXTS = ["t4 t5 t6 t7", "t9", "t8 t8 t5 t9 t40 t41", "t42 t43", "t7 t30 t31"]
PTX_COEF = 3.0
PTX_ROWS = 4
SHARED_COEFS = (0.0, 0.5)
PORTS_PER_CASE = 4
"""Maximum number of process groups that a case creates one after another."""
PTX_DIVISORS = (1.0, 16.0)
"""Loss denominator of each update."""


@dataclass
class RankJob:
    """A rank's position in a job, and its results.

    saved: by label of the layout, the folder of a trainer's state after its first step, and the
    trainer's parameters then.
    """

    rank: int
    model_path: str
    folder: Path
    ports: list[int]
    results: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, tuple[Path, dict[str, torch.Tensor]]] = field(default_factory=dict)

    def trainer(
        self,
        layout: Layout,
        algorithm: AlgorithmConfig = ALGORITHM,
        *,
        pretraining: PretrainingLoss | None = None,
        task: TrainingTask | None = None,
        **changes: Any,
    ) -> ModelTrainer:
        if layout.world_size > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.ports.pop()))
        settings = algorithm.to_settings(max_length=8, reward_weights={})
        policy = PolicyTask(self.model_path, algorithm.spec, settings, TEMPERATURE)
        return ModelTrainer(
            task or policy,
            config=layout.make_config(**{"lr": LR, **changes}),
            rank=self.rank if layout.world_size > 1 else 0,
            pretraining=pretraining,
        )


def split_rounds(
    groups: Mapping[str, Columns], *, num_micro_batches: int, num_shares: int
) -> list[Round]:
    """Split all rollouts into rounds; of five micro-batches the last leaves the last rank idle."""
    picks = [(uid, i) for uid, columns in groups.items() for i in range(len(columns["lengths"]))]
    num_parts = num_micro_batches * num_shares
    if num_parts > CUTS[-1]:
        num_parts -= 1
    parts = [tuple(picks[start::num_parts]) for start in range(num_parts)]
    parts += [()] * (num_micro_batches * num_shares - num_parts)
    return [tuple(parts[start : start + num_shares]) for start in range(0, len(parts), num_shares)]


def get_micro_batch(trainer: ModelTrainer, work: Round) -> MicroBatch:
    """Return a rank's micro-batch of a round."""
    return work[trainer._config.get_dp_rank(trainer.rank)]


def compute_divisor(groups: dict[str, Columns]) -> float:
    return compute_loss_denominator(
        SETTINGS.loss_aggregation,
        num_tokens=sum(int(columns["loss_mask"].sum()) for columns in groups.values()),
        num_sequences=sum(len(columns["lengths"]) for columns in groups.values()),
        num_turns=0,
        num_groups=len(groups),
        max_length=SETTINGS.max_length,
    )


def train_rounds(
    trainer: ModelTrainer,
    groups: dict[str, Columns],
    num_shares: int,
    *,
    num_micro_batches: int = 2,
    part: Sequence[str] | None = None,
) -> dict[str, float]:
    """Train all groups, or a part of them; return this rank's metric sums."""
    trained = groups if part is None else {uid: groups[uid] for uid in part}
    rounds = split_rounds(trained, num_micro_batches=num_micro_batches, num_shares=num_shares)
    return sum_metrics(
        trainer.train_micro_batch(groups, get_micro_batch(trainer, work)) for work in rounds
    )


def train_step(
    trainer: ModelTrainer, num_micro_batches: int, num_shares: int, version: int = 0
) -> tuple[dict[str, float], dict[str, float]]:
    """Run a step over all groups; return this rank's metric sums and the update's metrics."""
    sums = train_rounds(trainer, GROUPS, num_shares, num_micro_batches=num_micro_batches)
    return sums, trainer.update(compute_divisor(GROUPS), version)


def parameters_of(trainer: ModelTrainer) -> dict[str, torch.Tensor]:
    """Return the trained parameters under all their names."""
    parameters = {name: tensor.float().clone() for name, tensor in trainer.full_state()}
    for names in trainer._parameters.tied_groups:
        published_names = names & parameters.keys()
        assert len(published_names) <= 1, "one of them is published"
        parameters |= (
            dict.fromkeys(names, parameters[min(published_names)]) if published_names else {}
        )
    return parameters


def run_two_steps(job: RankJob, layout: Layout, cuts: int, **changes: Any) -> dict[str, Any]:
    trainer = job.trainer(layout, **changes)
    steps = [train_step(trainer, cuts, layout.num_shares) for _ in range(2)]
    results = {
        "norms": [report["policy/grad_norm"] for _, report in steps],
        "sums": steps[0][0],
        "parameters": parameters_of(trainer),
    }
    trainer.close()
    return results


def same_update(job: RankJob, layout: Layout) -> None:
    for cuts in CUTS:
        job.results[f"update/{layout.label}/{cuts}"] = run_two_steps(job, layout, cuts)


def save_first_step(job: RankJob, layout: Layout, folder: Path) -> ModelTrainer:
    trainer = job.trainer(layout, warmup_steps=4)
    train_step(trainer, 1, layout.num_shares)
    trainer.save_training_state(folder)
    return trainer


def save_and_resume(job: RankJob, layout: Layout) -> None:
    """Run a step, save, run a step; then repeat it from this and the other layouts' checkpoints."""
    if layout.world_size > 1 and not job.saved:
        trainer = save_first_step(job, ONE, job.folder / f"{ONE.label}-{job.rank}")
        # Both ranks load the state of rank 0. They meet below, when both have saved.
        job.saved[ONE.label] = job.folder / f"{ONE.label}-0", parameters_of(trainer)
        trainer.close()
    folder = job.folder / layout.label
    trainer = save_first_step(job, layout, folder)
    saved = parameters_of(trainer)
    first = second_step(trainer, layout)
    trainer.close()
    trainer = job.trainer(layout, warmup_steps=4)
    moved = job.results[f"moved/{layout.label}"] = {}
    for label, (state, parameters) in job.saved.items():
        trainer.load_training_state(state)
        moved[label] = parameters, parameters_of(trainer), second_step(trainer, layout)
    trainer.load_training_state(folder)
    # The state is restored on demand. Other ranks may still read the first files.
    trainer.offload_optimizer()
    trainer.save_training_state(job.folder / f"{layout.label}-again")
    storages = {t.untyped_storage() for t in trainer._backend.iter_optimizer_state()}
    sizes = {storage: storage.nbytes() for storage in storages}
    trainer.offload_optimizer()
    job.results[f"offloaded/{layout.label}"] = sum(
        size for storage, size in sizes.items() if not storage.nbytes()
    )
    job.saved[layout.label] = folder, saved
    job.results[f"resume/{layout.label}"] = [first, second_step(trainer, layout)]
    trainer.close()


def master_weights(job: RankJob, layout: Layout) -> None:
    """Run and save a bfloat16 step in each stage; run the second step from there in all stages."""
    saved: dict[int, Path] = {}
    for stage in (1, 2, 3):
        stage_layout = replace(layout, zero_stage=stage)
        folder = job.folder / f"bf16-{job.rank}-{stage}"
        trainer = job.trainer(stage_layout, dtype="bfloat16", lr=SEVERAL_LR)
        _, start = train_step(trainer, 1, 1)
        trainer.save_training_state(folder)
        first = second_step(trainer, stage_layout)
        trainer.close()
        saved[stage] = folder
        runs = {}
        for source_stage, path in saved.items():
            trainer = job.trainer(stage_layout, dtype="bfloat16", lr=SEVERAL_LR)
            trainer.load_training_state(path)
            runs[source_stage] = second_step(trainer, stage_layout)
            trainer.close()
        job.results[f"bf16_state/{stage}"] = (start, first, runs)


def second_step(
    trainer: ModelTrainer, layout: Layout
) -> tuple[dict[str, float], dict[str, torch.Tensor], int]:
    _, report = train_step(trainer, 2, layout.num_shares, version=1)
    return report, parameters_of(trainer), trainer.num_updates


def valued_updates(job: RankJob, layout: Layout) -> None:
    """Run two steps of a critic, of the policy, and of models that both share."""
    settings = PPO.to_settings(max_length=8, reward_weights={})
    task_args = (job.model_path, PPO.spec, settings)
    tasks: dict[str, TrainingTask] = {
        "critic": CriticTask(*task_args, VALUE_CLIP),
        "policy": PolicyTask(*task_args, TEMPERATURE),
    }
    for coef in SHARED_COEFS:
        heads = TwoHeadedTask(*task_args, TEMPERATURE, value_clip=VALUE_CLIP, value_coef=coef)
        tasks[f"shared {coef}"] = heads
    for kind, task in tasks.items():
        trainer, sums = job.trainer(layout, PPO, task=task, lr=SEVERAL_LR), []
        for _ in range(2):
            sums.append(train_rounds(trainer, VALUED, layout.num_shares))
            report = trainer.update(SEVERAL_DIVISOR)
        trainer.save_model(job.folder / f"{kind}-{layout.label}")
        results = {"sums": sums, "parameters": parameters_of(trainer), "report": report}
        job.results[f"{kind}/{layout.label}"] = results
        trainer.close()


def pretraining_updates(job: RankJob, layout: Layout) -> None:
    """Run updates with a gradient from the pretraining texts only."""
    texts = PretrainingLoss(
        TextStream(TEXTS, seed=0),
        PreTrainedTokenizerFast.from_pretrained(job.model_path),
        coef=PTX_COEF,
        num_texts=PTX_ROWS,
        max_tokens=5,
        micro_batch_tokens=8,
    )
    trainer = job.trainer(layout, AlgorithmConfig(), pretraining=texts, lr=SEVERAL_LR)
    reports = []
    for divisor in PTX_DIVISORS:
        train_rounds(trainer, EQUAL_SCORES, layout.num_shares)
        reports.append(trainer.update(divisor))
    parameters = parameters_of(trainer)
    trainer.close()
    job.results[f"pretraining/{layout.label}"] = {"reports": reports, "parameters": parameters}


def lora_updates(job: RankJob, layout: Layout) -> None:
    """Run two LoRA steps, then repeat the second from a checkpoint after the first."""
    job = replace(job, model_path=str(job.folder / NARROW))
    folder = job.folder / f"lora-{layout.label}"
    trainer = job.trainer(layout, lr=SEVERAL_LR, **LORA)
    start = parameters_of(trainer)
    reports = [train_step(trainer, 2, layout.num_shares)[1]]
    trainer.save_training_state(folder / "state")
    repeated, first = second_step(trainer, layout), parameters_of(trainer)
    trainer.save_model(folder / "model")
    trainer.close()
    trainer = job.trainer(layout, lr=SEVERAL_LR, **LORA)
    trainer.load_training_state(folder / "state")
    resumed = second_step(trainer, layout)
    trainer.close()
    trainer = job.trainer(layout, lr=SEVERAL_LR, **{**LORA, "lora_alpha": 4.0})
    refusal = catch_message(CheckpointError, lambda: trainer.load_training_state(folder / "state"))
    job.results[f"lora/{layout.label}"] = {
        "start": start,
        "norms": [report["policy/grad_norm"] for report in (*reports, repeated[0])],
        "published": first,
        "runs": [repeated, resumed],
        "refusal": refusal,
    }
    trainer.close()


def several_updates(job: RankJob, layout: Layout) -> None:
    """Run a step of two epochs of two updates; groups are dealt to the updates in turn."""
    trainer = job.trainer(layout, SEVERAL, lr=SEVERAL_LR)
    uids = list(GROUPS)
    trainer.plan_step(GROUPS)
    for work in split_rounds(GROUPS, num_micro_batches=2, num_shares=layout.num_shares):
        trainer.precompute_logprobs(GROUPS, get_micro_batch(trainer, work))
    trainer.sync_plan()
    sums = []
    for part in (uids[::2], uids[1::2]) * SEVERAL.epochs:
        sums.append(train_rounds(trainer, GROUPS, layout.num_shares, part=part))
        trainer.update(SEVERAL_DIVISOR)
    parameters = parameters_of(trainer)
    trainer.close()
    job.results[f"several/{layout.label}"] = {"sums": sums, "parameters": parameters}


def first_look(job: RankJob, layout: Layout) -> None:
    """Run a step that needs entropies and norms of scores before its update."""
    trainer = job.trainer(layout, LOOKING, lr=SEVERAL_LR)
    trainer.plan_step(GROUPS)
    for work in split_rounds(GROUPS, num_micro_batches=2, num_shares=layout.num_shares):
        trainer.precompute_logprobs(GROUPS, get_micro_batch(trainer, work))
    trainer.sync_plan()
    sums = train_rounds(trainer, GROUPS, layout.num_shares)
    advantages = trainer.drain_advantages()
    trainer.update(SEVERAL_DIVISOR)
    results = {"sums": sums, "advantages": advantages, "parameters": parameters_of(trainer)}
    trainer.close()
    job.results[f"first_look/{layout.label}"] = results


def sum_metrics(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def catch_message(kind: type[Exception], run: Callable[[], object]) -> str:
    """Return the message of the error that a call raises."""
    try:
        run()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def muon_updates(job: RankJob, layout: Layout) -> None:
    """Run two steps with Muon, and the second again from the checkpoint of the first."""
    # Ranks of one share a folder; each process alone has its own.
    alone = f"-{job.rank}" if layout.world_size == 1 else ""
    folder = job.folder / f"muon-{layout.label}{alone}"
    trainer = job.trainer(layout, optimizer="muon")
    results = [parameters_of(trainer)]
    train_step(trainer, 1, layout.num_shares)
    trainer.save_training_state(folder)
    results.append(parameters_of(trainer))
    train_step(trainer, 1, layout.num_shares)
    results.append(parameters_of(trainer))
    trainer.close()
    trainer = job.trainer(layout, optimizer="muon")
    trainer.load_training_state(folder)
    results.append(parameters_of(trainer))
    train_step(trainer, 1, layout.num_shares)
    job.results[f"muon/{layout.label}"] = [*results, parameters_of(trainer)]
    trainer.close()


def skipped_updates(job: RankJob, layout: Layout) -> None:
    """Run steps without rollouts, then one with a non-finite gradient."""
    trainer = job.trainer(layout, warmup_steps=4)
    before = parameters_of(trainer)
    trainer.train_micro_batch({}, [])
    reports = [trainer.update(0.0, version) for version in (0, 0, 1, 1)]
    broken = dict(next(iter(GROUPS.values())))
    broken["scores"] = broken["scores"] * float("nan")
    share = trainer._config.get_dp_rank(job.rank)
    trainer.train_micro_batch({"0:9:0": broken}, [("0:9:0", 0)] if share == 0 else [])
    message = catch_message(StreamError, lambda: trainer.update(1.0))
    after = parameters_of(trainer)
    trainer.close()
    job.results[f"skipped/{layout.label}"] = {
        "reports": reports,
        "message": message,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
    }


def rounded_updates(job: RankJob, layout: Layout) -> None:
    """Run two steps in bfloat16, the default on GPUs."""
    job.results[f"rounded/{layout.label}"] = run_two_steps(job, layout, 2, dtype="bfloat16")


def overlapped_updates(job: RankJob, layout: Layout) -> None:
    """Reduce gradients as on a GPU, where a second bucket fills meanwhile."""
    with mock.patch.object(TrainerConfig, "overlaps_reduction", lambda self, on_gpu: True):
        job.results[f"overlapped/{layout.label}"] = run_two_steps(job, layout, CUTS[-1])


def recomputed_updates(job: RankJob, layout: Layout) -> None:
    """Recompute activations; in the last round rank 0 has several chunks, the idle rank one."""
    with mock.patch.object(activation_checkpointing, "MLP_CHUNK_TOKENS", 5):
        job.results[f"recomputed/{layout.label}"] = run_two_steps(
            job, layout, CUTS[-1], gradient_checkpointing=True
        )


def other_settings(job: RankJob, layout: Layout) -> None:
    for stage in (1, 2, 3):
        sharded = replace(layout, zero_stage=stage)
        job.results[f"offloaded/{stage}"] = resume_offloaded(job, sharded)
    for offload in (False, True):
        first = replace(layout, zero_stage=1)
        trainer = job.trainer(first, dtype="bfloat16", offload_optimizer=offload)
        train_step(trainer, 5, layout.num_shares)
        state = list(trainer._backend.iter_optimizer_state())
        job.results[f"bfloat16 state/{offload}"] = [tensor.clone() for tensor in state]
        trainer.close()


def resume_offloaded(job: RankJob, layout: Layout) -> list[dict[str, torch.Tensor]]:
    """Return the parameters of a second step, at first and after loading the first's state."""
    folder = job.folder / f"offloaded-{layout.label}"
    trainer = job.trainer(layout, offload_optimizer=True)
    train_step(trainer, 1, layout.num_shares)
    trainer.save_training_state(folder)
    parameters = []
    for _ in range(2):
        train_step(trainer, 1, layout.num_shares)
        parameters.append(parameters_of(trainer))
        trainer.close()
        trainer = job.trainer(layout, offload_optimizer=True)
        trainer.load_training_state(folder)
    trainer.close()
    return parameters


def row(job: RankJob, layout: Layout, name: str) -> None:
    """Train on policy, then off policy on the same rollouts; two ranks have half each."""
    groups = scored_groups(job.model_path)
    config = AlgorithmConfig(name=name)
    settings = config.to_settings(max_length=10, reward_weights={"right": 1.0})
    task = PolicyTask(job.model_path, config.spec, settings, TEMPERATURE)
    trainer = job.trainer(layout, config, task=task, lr=SEVERAL_LR)
    norms = [train_row(trainer, groups, layout)["policy/grad_norm"] for _ in range(2)]
    job.results[f"row/{layout.label}/{name}"] = {
        "norms": norms,
        "parameters": parameters_of(trainer),
    }
    trainer.close()


def train_row(
    trainer: ModelTrainer, groups: dict[str, Columns], layout: Layout
) -> dict[str, float]:
    """Run a step, in a micro-batch on a single rank or two on each of two ranks."""
    trainer.plan_step(groups)
    rounds = split_rounds(groups, num_micro_batches=layout.num_shares, num_shares=layout.num_shares)
    sums = sum_metrics(
        trainer.train_micro_batch(groups, get_micro_batch(trainer, work)) for work in rounds
    )
    total = torch.tensor(list(sums.values()), dtype=torch.float64, device=get_local_device())
    if layout.world_size > 1:
        dist.all_reduce(total)
    total_sums = dict(zip(sums, total.tolist(), strict=True))
    return trainer.update(trainer.compute_loss_denominator(total_sums))


@cache
@torch.no_grad()
def scored_groups(model_path: str) -> dict[str, Columns]:
    """Make groups of plausible rollouts with the columns that any algorithm needs."""
    module = load_model(model_path, dtype=torch.float32)
    groups: dict[str, Columns] = {}
    for uid, columns in GROUPS.items():
        scores = columns["scores"]
        logprobs = [
            forward_logprobs(module, rollout, temperature=TEMPERATURE)
            for rollout in columns_to_rollouts(columns)
        ]
        expected = np.where(columns["loss_mask"], 0.1, 0).astype(np.float32)
        groups[uid] = {
            **columns,
            "generator_logprobs": np.concatenate(logprobs).astype(np.float32),
            "reward/right": scores,
            "baseline_scores": np.full_like(scores, scores.mean()),
            "costs": 1 - scores,
            "values": expected,
            "cost_values": expected,
        }
    return groups


def save_late(job: RankJob, layout: Layout) -> None:
    """Let rank 1 save the model after the timeout of a collective, as after a slow disk."""
    trainer = job.trainer(layout, collective_timeout_s=LATE_SAVE_S)
    time.sleep(2 * LATE_SAVE_S * job.rank)
    trainer.save_model(job.folder / f"{layout.label}-late")
    trainer.close()
    job.results[f"late/{layout.label}"] = (job.folder / f"{layout.label}-late").is_dir()


class TrainerCase(NamedTuple):
    """A sequence of steps that the ranks of a layout run: a function above, and its arguments."""

    name: str
    layout: Layout
    more: tuple[str, ...] = ()


def run_cases(
    rank: int, plan: Sequence[TrainerCase], model_path: str, folder: Path, ports: list[int]
) -> Any:
    """Run all cases in a process and return the results."""
    job = RankJob(rank, model_path, folder, list(ports))
    for case in plan:
        globals()[case.name](job, case.layout, *case.more)
    return job.results


def run_ranks(
    cases: Iterable[TrainerCase], *, model_path: str, folder: Path, timeout_s: float
) -> dict[str, list[Any]]:
    """Return the results of two processes by case: an entry per rank, or one for a single rank.

    Cases on two ranks run first, torch before DeepSpeed. ZeRO 3 numbers all parameters a process
    has ever had, and the numbers must agree between ranks. ZeRO 3 also leaves behind a patched
    linear function that does not support FSDP.
    """
    order = sorted(cases, key=lambda case: case.layout.backend, reverse=True)
    two_rank_cases = [case for case in order if case.layout.world_size == 2]
    single_rank_cases = [case for case in order if case.layout.world_size == 1]
    plans = [[*two_rank_cases, *single_rank_cases[rank::2]] for rank in range(2)]
    ports = find_free_ports(len(two_rank_cases) * PORTS_PER_CASE)
    arguments = [(rank, plan, model_path, folder, ports) for rank, plan in enumerate(plans)]
    results: dict[str, list[Any]] = {}
    for process_results in forked.run(run_cases, arguments, timeout_s=timeout_s):
        for name, value in process_results.items():
            results.setdefault(name, []).append(value)
    return results


def find_free_ports(count: int) -> list[int]:
    """Return free ports below the range of outgoing connections.

    The system draws them: concurrent test sessions may have seeded `random` alike.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 32_000), 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            break
    return ports
