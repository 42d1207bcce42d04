"""Workers with real engines, for loops of one's own: policy, critics, reference, rewards, costs.

A row of their batches is a group: a cell for its prompt, and one for each of its columns, by the
names of `messages.COLUMN_SPECS`. What a row derives from groups, advantages and returns, is the
column `derived`. Scoring is handed out by rows. An update is handed out whole: advantages may
compare all groups of a step, and rollouts are dealt to ranks by their lengths, each of them once,
so that neither padding nor the number of ranks has a say in it.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.actors.launch.fork_server import GENERATOR_LEVEL, STAGE_ENV, make_level_env
from streamrl.actors.shared_weights import SharedWeights
from streamrl.actors.trainer import make_logprob_check
from streamrl.algorithms import step_loss_denominator, summarise_policy
from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.algorithms.math.step_metrics import summarise_critic
from streamrl.buffer.assembly.micro_batch_schedule import StepScheduler, UpdatePlan
from streamrl.buffer.assembly.packing import RolloutIndex, pack_rollouts
from streamrl.config import RunConfig
from streamrl.config.preflight import check_worker_memory
from streamrl.config.role_counts import with_placement_mode
from streamrl.controller import PROTOCOLS, Batch, WorkerContext, add_protocol, transfers
from streamrl.dataflow import (
    BASELINE_CALL,
    COST_CALL,
    CRITIC,
    CRITIC_BY_COLUMN,
    GENERATE_CALL,
    GREEDY_CALL,
    POLICY,
    REWARD_CALL,
    SEQUENCE_COLUMNS,
)
from streamrl.distributed.process_group import translate_collective_errors
from streamrl.engines.generation.pending_requests import do_nothing
from streamrl.engines.memory.peak_memory import release_freed_memory, release_large_blocks_eagerly
from streamrl.engines.models.forward import ModelLoadOptions, compute_token_values, get_local_device
from streamrl.engines.training.collate import derive_columns
from streamrl.engines.training.forward_scorers import LogprobScorer, compute_token_column
from streamrl.engines.training.rollout_sums import sum_rollouts
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.errors import ConfigError, StreamError
from streamrl.files.hf_config import make_trusted_env
from streamrl.messages import (
    COLUMN_SPECS,
    Array,
    Columns,
    Experience,
    GroupLease,
    Prompt,
    is_component_column,
)
from streamrl.pipeline import verify_weights
from streamrl.placement import WorkerMemory
from streamrl.stream.train_step import add_metric_sums
from streamrl.weights import WeightLoadStats, WeightManifest
from streamrl.weights.logprob_probe import is_logprob_check_due

PROMPT_COLUMN = "prompt"
DERIVED_COLUMN = "derived"
#: All ranks work on the whole batch together; what they agree on is told once.
TO_ALL_FROM_FIRST = add_protocol(
    "TO_ALL_FROM_FIRST", PROTOCOLS["ONE_TO_ALL"].distribute, PROTOCOLS["RANK_ZERO"].collect
).name
Metrics = dict[str, float]
TrainResult = tuple[dict[str, float], Metrics]
"""What a step told: sums over all ranks, and the mean of what its updates told."""


def make_engine_env(config: RunConfig, *, on_gpu: bool) -> dict[str, str]:
    """Environment for the processes of the workers here."""
    own = make_vllm_env("cuda" if on_gpu else "cpu", threads=config.generator.threads)
    accelerator = {} if on_gpu else {"DS_ACCELERATOR": "cpu"}
    trusted = make_trusted_env(*config.trusted_models)
    return {**STAGE_ENV, **own, **accelerator, **trusted, **make_level_env(GENERATOR_LEVEL)}


def set_world_size(config: RunConfig, ranks: int) -> RunConfig:
    """The settings for so many ranks: a group has as many as its mesh."""
    trainer, critic = replace(config.trainer, world_size=ranks), config.critic
    if "world_size" in critic.trainer:
        critic = replace(critic, trainer={**critic.trainer, "world_size": ranks})
    return replace(config, trainer=trainer, critic=critic)


def make_loop_config(config: RunConfig, ranks: int) -> RunConfig:
    """The settings of a policy that so many workers here both train and sample from.

    Raises ConfigError for a setting that would have no effect there, or cannot be had.
    """
    mode, splits = config.placement.mode, config.generator.tensor_parallel
    every = config.reference.every
    refused = (
        ("filter.kind", config.filter.kind, "none", "takes no group out"),
        ("reference.every", every, 0, "has a reference that stays where it began"),
        ("generator.tensor_parallel", splits, 1, "has a whole generator in each worker"),
    )
    for key, value, only, reason in refused:
        if value != only:
            raise ConfigError(f"{key}={value}: a loop of one's own {reason}; must be {only}")
    if mode not in ("auto", "colocated"):
        raise ConfigError(
            f"placement.mode={mode}: in a loop of one's own the policy's workers both train and"
            " generate; must be auto or colocated"
        )
    return with_placement_mode(set_world_size(config, ranks), "colocated")


def plan_loop_memory(config: RunConfig, *, on_gpu: bool) -> WorkerMemory:
    """What one of these workers holds, of the settings `make_loop_config` gives.

    Raises ConfigError with the arithmetic if it cannot stay within placement.memory_mb.
    """
    memory = check_worker_memory(config, on_gpu=on_gpu)
    assert memory is not None
    return memory


class TrainedWorker:
    """A rank of a model that is trained, by its role."""

    def __init__(self, place: WorkerContext, config: RunConfig, max_length: int, role: str) -> None:
        self._max_length = max_length
        self._config = config = set_world_size(config, place.size)
        self._context = place
        self._trainer_config = trainer = config.get_trainer_config(role)
        self._timeout_s = trainer.collective_timeout_s
        shares = [trainer.get_dp_rank(rank) for rank in range(place.size)]
        if [(at.dp_rank, at.pp_rank) for at in place.mesh.train.coordinates] != [
            (at, 0) for at in shares
        ]:
            raise ConfigError(
                f"trainer.tensor_parallel={trainer.tensor_parallel}: the {role}'s mesh must be"
                f" Grid(1, {trainer.tensor_parallel}, {trainer.dp_size}) for these ranks"
            )
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place.address, str(place.port)
        self._trainer = RealEngineFactory().make_trainer(config, max_length, place.rank, role)
        self._version = 0

    def _train_step(self, batch: Batch) -> TrainResult:
        """The updates of a step."""
        groups = map_groups_by_uid(batch)
        self._trainer.plan_step(groups, dict(zip(groups, batch[DERIVED_COLUMN], strict=True)))
        settings, share = (
            self._config.algorithm_settings,
            self._trainer_config.get_dp_rank(self._context.rank),
        )
        pace = UpdatePlan(settings.scope == "step", settings.epochs, settings.mini_batches)
        budget = self._config.pipeline.micro_batch_tokens
        shares = self._trainer_config.dp_size
        schedule = StepScheduler(pace, world_size=shares, micro_batch_tokens=budget)
        for uid, columns in groups.items():
            schedule.add_group(uid, columns["lengths"].tolist())
        turns = schedule.take_rounds(complete=True)
        self._precompute_logprobs(
            groups, [turn.micro_batches[share] for turn in turns if turn.epoch == 0]
        )
        total: dict[str, float] = {}
        since: dict[str, float] = {}
        updates = []
        for turn in turns:
            picks = turn.micro_batches[share]
            own = {uid: groups[uid] for uid, _ in picks}
            add_metric_sums(since, self._trainer.train_micro_batch(own, picks, self._version))
            if turn.is_last_of_update:
                since = self._sum_over_ranks(since)
                updates.append(self._trainer.step(self._trainer.compute_loss_denominator(since)))
                add_metric_sums(total, since)
                since = {}
        return total, _average_metrics(updates)

    def _precompute_logprobs(
        self, groups: Mapping[str, Columns], works: Sequence[Sequence[RolloutIndex]]
    ) -> None:
        """Note what is to be known of the model before a step changes it; of a policy."""

    def _sum_over_ranks(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The sums of all ranks; those that are tensor parallel have the same."""
        total: dict[str, float] = {}
        for part in self._all_gather(dict(sums), "sums")[:: self._trainer_config.tensor_parallel]:
            add_metric_sums(total, part)
        return total

    def _all_gather(self, said: Any, what: str) -> list[Any]:
        parts: list[Any] = [None] * self._context.size
        with self._limit_wait(what):
            dist.all_gather_object(parts, said)
        return parts

    def _limit_wait(self, what: str) -> AbstractContextManager[None]:
        waited = f"rank {self._context.rank} waited {self._timeout_s:g} s"
        return translate_collective_errors(f"{waited} for the others' {what}")


class PolicyWorker(TrainedWorker):
    """A rank of the policy: trainer and generator in one process, on the same weights in place.

    max_length: most tokens of prompt and completion together.
    """

    def __init__(self, place: WorkerContext, config: RunConfig, max_length: int) -> None:
        config, on_gpu = make_loop_config(config, place.size), torch.cuda.is_available()
        if on_gpu and config.generator.kv_cache_mb is None:
            raise ConfigError(
                "generator.kv_cache_mb=null: must be set where a generator shares a GPU, here with"
                " its trainer, else the KV cache takes what there is"
            )
        self._worker_memory = plan_loop_memory(config, on_gpu=on_gpu)
        if config.placement.memory_mb is not None:
            release_large_blocks_eagerly()
        self._shared_weights = SharedWeights()
        super().__init__(place, config, max_length, POLICY)
        self._settings = self._config.algorithm_settings
        self._adaptive_params = AdaptiveParams(config.algorithm.spec, self._settings)
        self._loop = asyncio.Runner()
        self._loop.run(self._start_generator())

    @transfers("P3D_ALL_MICRO_DP")
    def generate_sequences(self, batch: Batch) -> dict[str, list[Array]]:
        """The rollouts of each prompt: the columns ROLLOUT_COLUMNS."""
        return self._sample_groups(GENERATE_CALL.stage, batch[PROMPT_COLUMN])

    @transfers("P3D_ALL_MICRO_DP")
    def generate_greedy(self, batch: Batch) -> dict[str, list[Array]]:
        """The likeliest completion of each prompt: the column greedy_ids."""
        return self._sample_groups(GREEDY_CALL.stage, batch[PROMPT_COLUMN])

    @transfers("RANK_ZERO")
    def compute_advantages(self, batch: Batch) -> dict[str, list[Columns]]:
        """What the algorithm derives from the groups of a step: the column derived."""
        settings = self._settings.with_adaptive_params(self._adaptive_params.values)
        found = derive_columns(self._config.algorithm.spec, settings, map_groups_by_uid(batch))
        return {DERIVED_COLUMN: list(found.values())}

    @transfers(TO_ALL_FROM_FIRST)
    def update_policy(self, batch: Batch) -> Metrics:
        """Train a step, and sample from what came of it: figures by their names in the metrics.

        While a critic is warmed up alone, the policy stays as it is.
        """
        groups, dials = map_groups_by_uid(batch), dict(self._adaptive_params.values)
        told = sum_rollouts(groups, list_rollouts(groups))
        figures = _average_scores(told)
        self._trainer.set_adaptive_params(dials)
        trains = self._version >= self._config.critic.warmup_alone
        trained, moved = self._loop.run(self._train_next_version(batch if trains else None))
        if trained:
            sums, updates = trained
            self._adaptive_params.update_after_step(
                {**told, **sums}, num_rollouts=int(told["rollouts"])
            )
            figures |= summarise_policy(sums, step_loss_denominator(self._settings, sums)) | updates
        figures |= {f"dial/{name}": value for name, value in dials.items()}
        return {**figures, **moved, **self._gather_memory_peaks()}

    @transfers(TO_ALL_FROM_FIRST)
    def save_model(self, folder: Path) -> None:
        """Write the model as a Hugging Face directory, on rank 0's node."""
        self._trainer.save_model(folder)

    async def _start_generator(self) -> None:
        """Have the generator beside the trainer, with its weights."""
        if self._worker_memory.offloads_optimizer:
            self._trainer.offload_optimizer()
        starting = RealEngineFactory().make_generator(
            self._config, self._max_length, self._context.rank
        )
        self._generator = await starting
        await self._shared_weights.attach_generator(
            self._generator, fills=self._config.needs_resharding
        )
        self._shared_weights.publish_version(self._trainer, self._version)
        await self._activate_version()

    async def _train_next_version(self, batch: Batch | None) -> tuple[TrainResult | None, Metrics]:
        """Train a step, if there is one, and sample from the weights as they are then.

        What the step told, and the bytes that had to be moved and copied for the weights.
        """
        trained = None
        await self._shared_weights.invalidate_weights()
        releases_kv = self._worker_memory.releases_kv and batch is not None
        async with self._shared_weights.run_training_phase(releases_kv=releases_kv):
            if batch is not None:
                trained = self._train_step(batch)
            self._version += 1
            self._shared_weights.publish_version(self._trainer, self._version)
            if self._worker_memory.offloads_optimizer:
                self._trainer.offload_optimizer()
            release_freed_memory()
        fetched = self._shared_weights.fetch_version(self._version)
        loaded = await self._activate_version()
        return trained, {
            "weights/bytes": float(fetched.num_bytes),
            "weights/copied_bytes": float(fetched.copied_bytes + loaded.copied_bytes),
        }

    async def _activate_version(self) -> WeightLoadStats:
        """Have the generator sample from the weights as they are, once it is seen to be the same
        model."""
        manifest = WeightManifest(self._version, (), ())
        if is_logprob_check_due(self._version, every=self._config.weights.probe_every):
            probe = make_logprob_check(self._trainer, self._config, max_length=self._max_length)
            manifest = replace(manifest, logprob_check=probe)
        loaded = await self._shared_weights.activate_version(self._generator, self._version)
        name = f"generator-{self._context.rank}"
        await verify_weights(self._generator, name, manifest, loaded.verification)
        return loaded

    def _gather_memory_peaks(self) -> Metrics:
        """The most any rank held in each phase since the last call."""
        peaks: Metrics = {}
        for part in self._all_gather(
            self._shared_weights.peak_memory.drain_peaks(), "peaks of memory"
        ):
            for phase, peak_mb in part.items():
                name = f"memory/{phase}_mb"
                peaks[name] = max(peaks.get(name, 0.0), peak_mb)
        return peaks

    def _sample_groups(self, stage: str, prompts: Sequence[Prompt]) -> dict[str, list[Array]]:
        if self._shared_weights.is_changing:
            # The generator would stand still for ever.
            raise StreamError("an update failed half-way: there are no weights to sample with")
        sample = self._generator.stages[stage]

        async def all_groups() -> list[Columns]:
            return await asyncio.gather(*(sample(prompt, None, do_nothing) for prompt in prompts))

        return to_batch(self._loop.run(all_groups()))

    def _precompute_logprobs(
        self, groups: Mapping[str, Columns], works: Sequence[Sequence[RolloutIndex]]
    ) -> None:
        if self._settings.should_recompute_logprobs:
            for picks in works:
                self._trainer.precompute_logprobs({uid: groups[uid] for uid, _ in picks}, picks)
            self._trainer.sync_plan()


class CriticWorker(TrainedWorker):
    """A rank of a critic, of rewards or of costs by its role."""

    def __init__(
        self, place: WorkerContext, config: RunConfig, max_length: int, role: str = CRITIC
    ) -> None:
        super().__init__(place, config, max_length, role)
        self._role = role
        (self._column,) = (column for column, critic in CRITIC_BY_COLUMN.items() if critic == role)

    @transfers("P3D")
    def compute_values(self, batch: Batch) -> dict[str, list[Array]]:
        """A value per token of every group: the column values, or cost_values."""
        budget = self._config.pipeline.micro_batch_tokens
        lacking = self._count_missing_rounds(batch)
        found = compute_concatenated(
            batch, lambda columns: compute_token_column(columns, self._compute_token_values, budget)
        )
        for _ in range(lacking):
            token = torch.zeros(1, 1, dtype=torch.long, device=get_local_device())
            self._compute_token_values({"token_ids": token, "attention_mask": token == 0})
        return {self._column: found}

    def _count_missing_rounds(self, batch: Batch) -> int:
        """How many micro-batches another rank has more of, which this one has to keep company."""
        if not self._trainer.has_sharded_params:
            return 0
        lengths = [length for cells in batch["lengths"] for length in cells.tolist()]
        sized = [("", i, length) for i, length in enumerate(lengths)]
        budget = self._config.pipeline.micro_batch_tokens
        own = len(pack_rollouts(sized, world_size=1, micro_batch_tokens=budget))
        return max(self._all_gather(own, "number of micro-batches")) - own

    def _compute_token_values(self, rows: Mapping[str, Any]) -> torch.Tensor:
        """Of some rows. Where no rank has all parameters, all ranks are at this together."""
        # What is gathered is kept by those who gather, and has to be good for training, too.
        with self._limit_wait("values"), torch.inference_mode(False), torch.no_grad():
            return compute_token_values(
                self._trainer.forward, rows["token_ids"], rows["attention_mask"]
            )

    @transfers(TO_ALL_FROM_FIRST)
    def update_critic(self, batch: Batch) -> Metrics:
        """Train a step on the returns: figures by their names in the metrics."""
        sums, updates = self._train_step(batch)
        self._version += 1
        return summarise_critic(sums, self._role) | updates


class ReferenceWorker:
    """The policy as it was when the run began."""

    def __init__(self, place: WorkerContext, config: RunConfig, max_length: int) -> None:
        self._model = LogprobScorer(
            config.model.path,
            temperature=config.generator.temperature,
            micro_batch_tokens=config.pipeline.micro_batch_tokens,
            threads=config.trainer.threads,
            dtype=config.trainer.dtype,
            options=ModelLoadOptions(config.trainer.attention, max_length),
        )

    @transfers("DP")
    def compute_ref_logprobs(self, batch: Batch) -> dict[str, list[Array]]:
        """The column ref_logprobs."""
        name = "ref_logprobs"
        return {
            name: compute_concatenated(
                batch, lambda columns: self._model.compute_ref_logprobs(columns)[name]
            )
        }


class RewardWorker:
    """A run's rewards, or its costs where the role is that of costs."""

    def __init__(
        self, place: WorkerContext, config: RunConfig, role: str = REWARD_CALL.role
    ) -> None:
        self._loop = asyncio.Runner()
        # It judges texts, whatever their length.
        self._scorer = self._loop.run(RealEngineFactory().make_scorer(config, 0, role))

    @transfers("DP")
    def compute_rewards(self, batch: Batch) -> dict[str, list[Array]]:
        """The column scores, and the components they are combined from."""
        return self._score_groups(REWARD_CALL.stage, batch)

    @transfers("DP")
    def compute_baselines(self, batch: Batch) -> dict[str, list[Array]]:
        """What the likeliest completions would get: the column baseline_scores."""
        return self._score_groups(BASELINE_CALL.stage, batch)

    @transfers("DP")
    def compute_costs(self, batch: Batch) -> dict[str, list[Array]]:
        """The column costs, and the components they are combined from."""
        return self._score_groups(COST_CALL.stage, batch)

    def _score_groups(self, stage: str, batch: Batch) -> dict[str, list[Array]]:
        """Raises the error of a group that could not be judged."""
        groups = [
            Experience(
                GroupLease(0, prompt.uid, stage, 0, float("inf")), 0, prompt=prompt, columns=columns
            )
            for prompt, columns in zip(batch[PROMPT_COLUMN], get_group_columns(batch), strict=True)
        ]
        found = self._loop.run(_await_result(self._scorer.stages[stage](groups)))
        for result in found:
            if isinstance(result, StreamError):
                raise result
        return to_batch(found)


async def _await_result(results: Any) -> Any:
    return await results


def to_batch(groups: Sequence[Columns]) -> dict[str, list[Array]]:
    """The batch of some groups, a row each."""
    return {name: [columns[name] for columns in groups] for name in (groups[0] if groups else ())}


def get_group_columns(batch: Batch) -> list[Columns]:
    """The columns of every group of a batch, in the order of its rows."""
    names = [name for name in batch if name in COLUMN_SPECS or is_component_column(name)]
    return [
        dict(zip(names, cells, strict=True))
        for cells in zip(*(batch[name] for name in names), strict=True)
    ]


def map_groups_by_uid(batch: Batch) -> dict[str, Columns]:
    """The columns of every group by uid. Raises ValueError for a group that is there twice."""
    uids = [prompt.uid for prompt in batch[PROMPT_COLUMN]]
    if len(set(uids)) < len(uids):
        twice = next(uid for uid in uids if uids.count(uid) > 1)
        raise ValueError(f"prompt {twice} is there twice: a step trains a group once")
    return dict(zip(uids, get_group_columns(batch), strict=True))


def compute_concatenated(batch: Batch, compute: Callable[[Columns], Array]) -> list[Array]:
    """A token column, a cell for each group, of what is computed of all of them laid end to end."""
    groups = get_group_columns(batch)
    if not groups:
        return []
    whole = {
        name: np.concatenate([columns[name] for columns in groups]) for name in SEQUENCE_COLUMNS
    }
    ends = np.cumsum([len(columns["token_ids"]) for columns in groups])
    return np.split(compute(whole), ends[:-1])


def list_rollouts(groups: Mapping[str, Columns]) -> list[RolloutIndex]:
    """Every rollout of some groups."""
    return [(uid, i) for uid, columns in groups.items() for i in range(len(columns["lengths"]))]


def _average_scores(told: Mapping[str, float]) -> Metrics:
    """What the rollouts of a step got, by rollout."""
    names = {"score_sum": "reward/mean", "cost_sum": "cost/mean"}
    return {mean: told[name] / told["rollouts"] for name, mean in names.items() if name in told}


def _average_metrics(rows: Sequence[Mapping[str, float]]) -> Metrics:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: fmean(row[name] for row in rows if name in row) for name in names}
