"""Workers with real engines for own loops: policy, critics, reference, rewards, costs.

A row of a batch is a group: a cell for its prompt and a cell per column of `messages.COLUMN_SPECS`.
Advantages and returns of a group form the column `derived`.

Scoring splits a batch by rows. An update receives the whole batch on every rank, since advantages
may compare all groups of a step; the ranks share the rollouts by length without padding. So the
result does not depend on the number of ranks.
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
from streamrl.placement.colocated_memory import WorkerMemory
from streamrl.stream.train_step import add_metric_sums
from streamrl.weights import WeightLoadStats, WeightManifest
from streamrl.weights.logprob_probe import is_logprob_check_due

PROMPT_COLUMN = "prompt"
DERIVED_COLUMN = "derived"
#: Every rank gets the whole batch, and rank 0 answers for all: their results are equal.
TO_ALL_FROM_FIRST = add_protocol(
    "TO_ALL_FROM_FIRST", PROTOCOLS["ONE_TO_ALL"].distribute, PROTOCOLS["RANK_ZERO"].collect
).name
Metrics = dict[str, float]
TrainResult = tuple[dict[str, float], Metrics]
"""Result of a step: sums over all ranks, and the mean metrics of its updates."""


def make_engine_env(config: RunConfig, *, on_gpu: bool) -> dict[str, str]:
    """Return the environment variables that a worker's process needs before it imports engines."""
    vllm_env = make_vllm_env("cuda" if on_gpu else "cpu", threads=config.generator.threads)
    accelerator = {} if on_gpu else {"DS_ACCELERATOR": "cpu"}
    trusted = make_trusted_env(*config.trusted_models)
    return {**STAGE_ENV, **vllm_env, **accelerator, **trusted, **make_level_env(GENERATOR_LEVEL)}


def set_world_size(config: RunConfig, ranks: int) -> RunConfig:
    """Return the config with trainer.world_size set to a number of ranks.

    Sets the critic's world size too if the config has one.
    """
    trainer, critic = replace(config.trainer, world_size=ranks), config.critic
    if "world_size" in critic.trainer:
        critic = replace(critic, trainer={**critic.trainer, "world_size": ranks})
    return replace(config, trainer=trainer, critic=critic)


def make_loop_config(config: RunConfig, ranks: int) -> RunConfig:
    """Return the config of PolicyWorkers on `ranks` ranks: each worker trains and samples.

    Raises ConfigError for settings that have no effect in an own loop or are not supported there.
    """
    mode, tensor_parallel = config.placement.mode, config.generator.tensor_parallel
    every = config.reference.every
    fixed_settings = (
        ("filter.kind", config.filter.kind, "none", "filters no groups"),
        ("reference.every", every, 0, "has a fixed reference"),
        ("generator.tensor_parallel", tensor_parallel, 1, "has a whole generator in each worker"),
    )
    for key, value, required, reason in fixed_settings:
        if value != required:
            raise ConfigError(f"{key}={value}: an own loop {reason}; must be {required}")
    if mode not in ("auto", "colocated"):
        raise ConfigError(
            f"placement.mode={mode}: in an own loop the policy's workers both train and"
            " generate; must be auto or colocated"
        )
    return with_placement_mode(set_world_size(config, ranks), "colocated")


def plan_loop_memory(config: RunConfig, *, on_gpu: bool) -> WorkerMemory:
    """Return the memory budget of a PolicyWorker.

    config: as `make_loop_config` returns it. Raises ConfigError with the arithmetic if the worker
    cannot stay within placement.memory_mb.
    """
    memory = check_worker_memory(config, on_gpu=on_gpu)
    assert memory is not None
    return memory


class TrainedWorker:
    """Base class of workers that train: a rank of the policy or of a critic."""

    def __init__(
        self, context: WorkerContext, config: RunConfig, max_length: int, role: str
    ) -> None:
        self._max_length = max_length
        self._config = config = set_world_size(config, context.size)
        self._context = context
        self._trainer_config = trainer_config = config.get_trainer_config(role)
        self._timeout_s = trainer_config.collective_timeout_s
        dp_ranks = [trainer_config.get_dp_rank(rank) for rank in range(context.size)]
        mesh_ranks = [(at.dp_rank, at.pp_rank) for at in context.mesh.train.coordinates]
        if mesh_ranks != [(dp_rank, 0) for dp_rank in dp_ranks]:
            tensor_parallel = trainer_config.tensor_parallel
            raise ConfigError(
                f"trainer.tensor_parallel={tensor_parallel}: the mesh of the {role} must be"
                f" RankGrid(1, {tensor_parallel}, {trainer_config.dp_size})"
            )
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = context.address, str(context.port)
        self._trainer = RealEngineFactory().make_trainer(config, max_length, context.rank, role)
        self._version = 0

    def _train_step(self, batch: Batch) -> TrainResult:
        """Run a training step on this rank's share of a batch, with all its updates.

        Returns the sums over all ranks, and the mean metrics of the updates.
        """
        groups = map_groups_by_uid(batch)
        self._trainer.plan_step(groups, dict(zip(groups, batch[DERIVED_COLUMN], strict=True)))
        settings, dp_rank = (
            self._config.algorithm_settings,
            self._trainer_config.get_dp_rank(self._context.rank),
        )
        update_plan = UpdatePlan(settings.scope == "step", settings.epochs, settings.mini_batches)
        budget = self._config.pipeline.micro_batch_tokens
        dp_size = self._trainer_config.dp_size
        scheduler = StepScheduler(update_plan, world_size=dp_size, micro_batch_tokens=budget)
        for uid, columns in groups.items():
            scheduler.add_group(uid, columns["lengths"].tolist())
        rounds = scheduler.take_rounds(complete=True)
        self._precompute_logprobs(
            groups, [round_.micro_batches[dp_rank] for round_ in rounds if round_.epoch == 0]
        )
        step_sums: dict[str, float] = {}
        update_sums: dict[str, float] = {}
        updates = []
        for round_ in rounds:
            rollouts = round_.micro_batches[dp_rank]
            own_groups = {uid: groups[uid] for uid, _ in rollouts}
            add_metric_sums(
                update_sums, self._trainer.train_micro_batch(own_groups, rollouts, self._version)
            )
            if round_.is_last_of_update:
                update_sums = self._sum_over_ranks(update_sums)
                updates.append(
                    self._trainer.step(self._trainer.compute_loss_denominator(update_sums))
                )
                add_metric_sums(step_sums, update_sums)
                update_sums = {}
        return step_sums, _average_metrics(updates)

    def _precompute_logprobs(
        self, groups: Mapping[str, Columns], micro_batches: Sequence[Sequence[RolloutIndex]]
    ) -> None:
        """Store log-probabilities under the model before the step, for algorithms that need them.

        Does nothing here; PolicyWorker overrides it.
        """

    def _sum_over_ranks(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the sums over all data-parallel ranks; a collective.

        Tensor-parallel ranks have equal sums, so only the first of each counts.
        """
        total: dict[str, float] = {}
        for rank_sums in self._all_gather(dict(sums), "sums")[
            :: self._trainer_config.tensor_parallel
        ]:
            add_metric_sums(total, rank_sums)
        return total

    def _all_gather(self, value: Any, label: str) -> list[Any]:
        values: list[Any] = [None] * self._context.size
        with self._limit_wait(label):
            dist.all_gather_object(values, value)
        return values

    def _limit_wait(self, label: str) -> AbstractContextManager[None]:
        """Context that names this rank and `label` in the error of a collective that times out."""
        waited = f"rank {self._context.rank} waited {self._timeout_s:g} s"
        return translate_collective_errors(f"{waited} for the others' {label}")


class PolicyWorker(TrainedWorker):
    """Worker of a policy rank: a trainer and a generator that share the weights in place.

    max_length: maximum tokens of prompt and completion together.
    """

    def __init__(self, context: WorkerContext, config: RunConfig, max_length: int) -> None:
        config, on_gpu = make_loop_config(config, context.size), torch.cuda.is_available()
        if on_gpu and config.generator.kv_cache_mb is None:
            raise ConfigError(
                "generator.kv_cache_mb=null: must be set where a generator shares a GPU, here with"
                " its trainer; otherwise the KV cache takes all free memory"
            )
        self._worker_memory = plan_loop_memory(config, on_gpu=on_gpu)
        if config.placement.memory_mb is not None:
            release_large_blocks_eagerly()
        self._shared_weights = SharedWeights()
        super().__init__(context, config, max_length, POLICY)
        self._settings = self._config.algorithm_settings
        self._adaptive_params = AdaptiveParams(config.algorithm.spec, self._settings)
        self._loop = asyncio.Runner()
        self._loop.run(self._start_generator())

    @transfers("P3D_ALL_MICRO_DP")
    def generate_sequences(self, batch: Batch) -> dict[str, list[Array]]:
        """Sample a group of rollouts for each prompt of the batch; return ROLLOUT_COLUMNS."""
        return self._sample_groups(GENERATE_CALL.stage, batch[PROMPT_COLUMN])

    @transfers("P3D_ALL_MICRO_DP")
    def generate_greedy(self, batch: Batch) -> dict[str, list[Array]]:
        """Decode a greedy completion for each prompt of the batch; return the column greedy_ids."""
        return self._sample_groups(GREEDY_CALL.stage, batch[PROMPT_COLUMN])

    @transfers("RANK_ZERO")
    def compute_advantages(self, batch: Batch) -> dict[str, list[Columns]]:
        """Compute advantages and returns of all groups of a step; return the column derived."""
        settings = self._settings.with_adaptive_params(self._adaptive_params.values)
        derived = derive_columns(self._config.algorithm.spec, settings, map_groups_by_uid(batch))
        return {DERIVED_COLUMN: list(derived.values())}

    @transfers(TO_ALL_FROM_FIRST)
    def update_policy(self, batch: Batch) -> Metrics:
        """Train the policy on a batch, load the new weights into the generator, return metrics.

        During critic warm-up (critic.warmup_alone) the policy stays unchanged.
        """
        groups, adaptive_params = map_groups_by_uid(batch), dict(self._adaptive_params.values)
        rollout_sums = sum_rollouts(groups, list_rollouts(groups))
        metrics = _average_scores(rollout_sums)
        self._trainer.set_adaptive_params(adaptive_params)
        trains = self._version >= self._config.critic.warmup_alone
        train_result, transfer_metrics = self._loop.run(
            self._train_next_version(batch if trains else None)
        )
        if train_result:
            sums, updates = train_result
            self._adaptive_params.update_after_step(
                {**rollout_sums, **sums}, num_rollouts=int(rollout_sums["rollouts"])
            )
            metrics |= summarise_policy(sums, step_loss_denominator(self._settings, sums)) | updates
        metrics |= {f"dial/{name}": value for name, value in adaptive_params.items()}
        return {**metrics, **transfer_metrics, **self._gather_memory_peaks()}

    @transfers(TO_ALL_FROM_FIRST)
    def save_model(self, folder: Path) -> None:
        """Write the policy as a Hugging Face directory, on the node of rank 0."""
        self._trainer.save_model(folder)

    async def _start_generator(self) -> None:
        if self._worker_memory.offloads_optimizer:
            self._trainer.offload_optimizer()
        generator_start = RealEngineFactory().make_generator(
            self._config, self._max_length, self._context.rank
        )
        self._generator = await generator_start
        await self._shared_weights.attach_generator(
            self._generator, should_fill_storage=self._config.needs_resharding
        )
        self._shared_weights.publish_version(self._trainer, self._version)
        await self._activate_version()

    async def _train_next_version(self, batch: Batch | None) -> tuple[TrainResult | None, Metrics]:
        """Train on the batch, and switch the generator to the resulting version.

        Without a batch the weights stay the same. Returns the result of the training step, None
        without a batch, and the bytes moved and copied for the weights as metrics.
        """
        result = None
        await self._shared_weights.invalidate_weights()
        releases_kv = self._worker_memory.releases_kv and batch is not None
        async with self._shared_weights.run_training_phase(releases_kv=releases_kv):
            if batch is not None:
                result = self._train_step(batch)
            self._version += 1
            self._shared_weights.publish_version(self._trainer, self._version)
            if self._worker_memory.offloads_optimizer:
                self._trainer.offload_optimizer()
            release_freed_memory()
        fetched = self._shared_weights.fetch_version(self._version)
        load_stats = await self._activate_version()
        return result, {
            "weights/bytes": float(fetched.num_bytes),
            "weights/copied_bytes": float(fetched.copied_bytes + load_stats.copied_bytes),
        }

    async def _activate_version(self) -> WeightLoadStats:
        """Switch the generator to the trainer's current weights.

        Runs the logprob check if due (weights.probe_every).
        """
        manifest = WeightManifest(self._version, (), ())
        if is_logprob_check_due(self._version, every=self._config.weights.probe_every):
            logprob_check = make_logprob_check(
                self._trainer, self._config, max_length=self._max_length
            )
            manifest = replace(manifest, logprob_check=logprob_check)
        load_stats = await self._shared_weights.activate_version(self._generator, self._version)
        name = f"generator-{self._context.rank}"
        await verify_weights(self._generator, name, manifest, load_stats.verification)
        return load_stats

    def _gather_memory_peaks(self) -> Metrics:
        """Return the memory peak of each phase over all ranks, MiB; a collective."""
        peaks: Metrics = {}
        for rank_peaks in self._all_gather(
            self._shared_weights.peak_memory.drain_peaks(), "peaks of memory"
        ):
            for phase, peak_mb in rank_peaks.items():
                name = f"memory/{phase}_mb"
                peaks[name] = max(peaks.get(name, 0.0), peak_mb)
        return peaks

    def _sample_groups(self, stage: str, prompts: Sequence[Prompt]) -> dict[str, list[Array]]:
        """Sample the rollouts of all prompts concurrently in a generation stage; return columns."""
        if self._shared_weights.is_changing:
            # The generator stays paused until a version is activated, so sampling would hang.
            raise StreamError(
                "the last update failed midway; the weights are inconsistent, cannot sample"
            )
        sample = self._generator.stages[stage]

        async def sample_all() -> list[Columns]:
            return await asyncio.gather(*(sample(prompt, None, do_nothing) for prompt in prompts))

        return to_batch(self._loop.run(sample_all()))

    def _precompute_logprobs(
        self, groups: Mapping[str, Columns], micro_batches: Sequence[Sequence[RolloutIndex]]
    ) -> None:
        if self._settings.should_recompute_logprobs:
            for rollouts in micro_batches:
                self._trainer.precompute_logprobs(
                    {uid: groups[uid] for uid, _ in rollouts}, rollouts
                )
            self._trainer.sync_plan()


class CriticWorker(TrainedWorker):
    """Worker of a critic rank; the role selects the critic of rewards or of costs."""

    def __init__(
        self, place: WorkerContext, config: RunConfig, max_length: int, role: str = CRITIC
    ) -> None:
        super().__init__(place, config, max_length, role)
        self._role = role
        (self._column,) = (column for column, critic in CRITIC_BY_COLUMN.items() if critic == role)

    @transfers("P3D")
    def compute_values(self, batch: Batch) -> dict[str, list[Array]]:
        """Compute the value of each token; return the column values, or cost_values for costs."""
        budget = self._config.pipeline.micro_batch_tokens
        num_missing = self._count_missing_rounds(batch)
        values = compute_concatenated(
            batch, lambda columns: compute_token_column(columns, self._compute_token_values, budget)
        )
        # Sharded parameters are gathered in every forward pass, so all ranks must run equally many.
        for _ in range(num_missing):
            token = torch.zeros(1, 1, dtype=torch.long, device=get_local_device())
            self._compute_token_values({"token_ids": token, "attention_mask": token == 0})
        return {self._column: values}

    def _count_missing_rounds(self, batch: Batch) -> int:
        """Return how many more micro-batches the busiest rank has than this one.

        0 with unsharded parameters, where ranks need not run equally many.
        """
        if not self._trainer.has_sharded_params:
            return 0
        lengths = [length for column in batch["lengths"] for length in column.tolist()]
        sized = [("", i, length) for i, length in enumerate(lengths)]
        budget = self._config.pipeline.micro_batch_tokens
        num_rounds = len(pack_rollouts(sized, world_size=1, micro_batch_tokens=budget))
        return max(self._all_gather(num_rounds, "number of micro-batches")) - num_rounds

    def _compute_token_values(self, rows: Mapping[str, Any]) -> torch.Tensor:
        """Compute the token values of a padded batch; a collective with sharded parameters."""
        # Gathered parameters stay cached and training reuses them, so they must not be inference
        # tensors.
        with self._limit_wait("values"), torch.inference_mode(False), torch.no_grad():
            return compute_token_values(
                self._trainer.forward, rows["token_ids"], rows["attention_mask"]
            )

    @transfers(TO_ALL_FROM_FIRST)
    def update_critic(self, batch: Batch) -> Metrics:
        """Train the critic on a batch; return metrics."""
        sums, updates = self._train_step(batch)
        self._version += 1
        return summarise_critic(sums, self._role) | updates


class ReferenceWorker:
    """Worker with the fixed reference model: the policy as it was at the start of the loop."""

    def __init__(self, context: WorkerContext, config: RunConfig, max_length: int) -> None:
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
        """Compute the reference model's log-probability of each token: the column ref_logprobs."""
        name = "ref_logprobs"
        return {
            name: compute_concatenated(
                batch, lambda columns: self._model.compute_ref_logprobs(columns)[name]
            )
        }


class RewardWorker:
    """Worker that scores rollouts with the rewards of the config, or with its costs.

    role: "reward", or "cost" for the costs.
    """

    def __init__(
        self, context: WorkerContext, config: RunConfig, role: str = REWARD_CALL.role
    ) -> None:
        self._loop = asyncio.Runner()
        # max_length 0: text scorers have no length limit.
        self._scorer = self._loop.run(RealEngineFactory().make_scorer(config, 0, role))

    @transfers("DP")
    def compute_rewards(self, batch: Batch) -> dict[str, list[Array]]:
        """Score all rollouts; return the column scores and a column per reward component."""
        return self._score_groups(REWARD_CALL.stage, batch)

    @transfers("DP")
    def compute_baselines(self, batch: Batch) -> dict[str, list[Array]]:
        """Score the greedy completions; return the column baseline_scores."""
        return self._score_groups(BASELINE_CALL.stage, batch)

    @transfers("DP")
    def compute_costs(self, batch: Batch) -> dict[str, list[Array]]:
        """Compute the costs of all rollouts; return column costs and a column per component."""
        return self._score_groups(COST_CALL.stage, batch)

    def _score_groups(self, stage: str, batch: Batch) -> dict[str, list[Array]]:
        groups = [
            Experience(
                GroupLease(0, prompt.uid, stage, 0, float("inf")), 0, prompt=prompt, columns=columns
            )
            for prompt, columns in zip(batch[PROMPT_COLUMN], get_group_columns(batch), strict=True)
        ]
        results = self._loop.run(_await_result(self._scorer.stages[stage](groups)))
        for result in results:
            if isinstance(result, StreamError):
                raise result
        return to_batch(results)


async def _await_result(results: Any) -> Any:
    return await results


def to_batch(groups: Sequence[Columns]) -> dict[str, list[Array]]:
    """Return groups as a batch: a row per group, a list of arrays per column."""
    return {name: [columns[name] for columns in groups] for name in (groups[0] if groups else ())}


def get_group_columns(batch: Batch) -> list[Columns]:
    """Return the stored columns of every group of a batch, without derived ones."""
    names = [name for name in batch if name in COLUMN_SPECS or is_component_column(name)]
    return [
        dict(zip(names, cells, strict=True))
        for cells in zip(*(batch[name] for name in names), strict=True)
    ]


def map_groups_by_uid(batch: Batch) -> dict[str, Columns]:
    """Return the columns of each group of a batch, by uid; ValueError for a repeated group."""
    uids = [prompt.uid for prompt in batch[PROMPT_COLUMN]]
    if len(set(uids)) < len(uids):
        duplicate = next(uid for uid in uids if uids.count(uid) > 1)
        raise ValueError(
            f"prompt {duplicate} occurs twice in the batch; a step trains a group once"
        )
    return dict(zip(uids, get_group_columns(batch), strict=True))


def compute_concatenated(batch: Batch, compute: Callable[[Columns], Array]) -> list[Array]:
    """Compute a column with a value per token for all groups of a batch in a single call.

    compute: receives the sequences of all groups together, and returns their column. Returns the
    column of each group.
    """
    groups = get_group_columns(batch)
    if not groups:
        return []
    concatenated = {
        name: np.concatenate([columns[name] for columns in groups]) for name in SEQUENCE_COLUMNS
    }
    ends = np.cumsum([len(columns["token_ids"]) for columns in groups])
    return np.split(compute(concatenated), ends[:-1])


def list_rollouts(groups: Mapping[str, Columns]) -> list[RolloutIndex]:
    return [(uid, i) for uid, columns in groups.items() for i in range(len(columns["lengths"]))]


def _average_scores(sums: Mapping[str, float]) -> Metrics:
    names = {"score_sum": "reward/mean", "cost_sum": "cost/mean"}
    return {mean: sums[name] / sums["rollouts"] for name, mean in names.items() if name in sums}


def _average_metrics(rows: Sequence[Mapping[str, float]]) -> Metrics:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: fmean(row[name] for row in rows if name in row) for name in names}
