"""Workers with real engines for own loops: policy, critics, reference, rewards, costs.

A row of a batch is a group, as in `controller/group_rows.py`.

Scoring splits a batch by rows. An update receives the whole batch on every rank, since advantages
may compare all groups of a step; the ranks share the rollouts by length without padding. So the
result does not depend on the number of ranks.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.actors.launch.fork_server import GENERATOR_LEVEL, STAGE_ENV, make_level_env
from streamrl.actors.shared_weights import SharedWeights
from streamrl.actors.trainer import make_logprob_check
from streamrl.actors.transport.ray_calls import RAY_ACCESS
from streamrl.algorithms import summarise_policy
from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.algorithms.math.training_metrics import summarise_critic
from streamrl.buffer.assembly.micro_batch_schedule import StepScheduler, UpdatePlan
from streamrl.buffer.assembly.packing import pack_rollouts
from streamrl.config.own_loop import make_loop_config, set_world_size
from streamrl.config.preflight import check_worker_memory
from streamrl.config.run_config import RunConfig
from streamrl.controller import Batch, WorkerContext, transfers
from streamrl.controller.group_rows import (
    DERIVED_COLUMN,
    PROMPT_COLUMN,
    compute_concatenated,
    get_group_columns,
    map_groups_by_uid,
    to_batch,
)
from streamrl.dataflow import (
    CRITIC,
    CRITIC_BY_COLUMN,
    GENERATE_CALL,
    GREEDY_CALL,
    POLICY,
    SOURCE_CALLS,
    CallKind,
    ModelCall,
)
from streamrl.distributed.process_group import translate_collective_errors
from streamrl.engines.generation.requests_in_flight import do_nothing
from streamrl.engines.memory.peak_memory import release_freed_memory, release_large_blocks_eagerly
from streamrl.engines.models.forward import compute_token_values, get_local_device
from streamrl.engines.training.collate import derive_columns
from streamrl.engines.training.forward_scorers import compute_token_column
from streamrl.engines.training.rollout_sums import sum_rollouts
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.errors import ConfigError, StreamError
from streamrl.files.hf_config import make_trusted_env
from streamrl.messages import Array, Columns, Experience, GroupLease, Prompt
from streamrl.pipeline import verify_weights
from streamrl.stream.protocols import FetchedWeights
from streamrl.stream.step_metrics import average_metrics
from streamrl.stream.train_step import add_metric_sums
from streamrl.weights import WeightLoadStats, WeightManifest
from streamrl.weights.buckets import publish_version, unpack_tensors
from streamrl.weights.logprob_check import is_logprob_check_due
from streamrl.weights.transports.object_store import ObjectStoreReader, ObjectStoreWriter

Metrics = dict[str, float]
TrainResult = tuple[dict[str, float], Metrics]
"""Result of a step: sums over all ranks, and the mean metrics of its updates."""


def make_engine_env(config: RunConfig, *, on_gpu: bool) -> dict[str, str]:
    """Return the environment variables that a worker's process needs before it imports engines."""
    vllm_env = make_vllm_env("cuda" if on_gpu else "cpu", threads=config.generator.threads)
    accelerator = {} if on_gpu else {"DS_ACCELERATOR": "cpu"}
    trusted = make_trusted_env(*config.trusted_models)
    return {**STAGE_ENV, **vllm_env, **accelerator, **trusted, **make_level_env(GENERATOR_LEVEL)}


class TrainedWorker:
    """Base class of workers that train: a rank of the policy or of a critic."""

    def __init__(
        self, context: WorkerContext, config: RunConfig, max_length: int, role: str
    ) -> None:
        self._max_length = max_length
        self._config = config = set_world_size(config, context.size)
        self._context, self._role = context, role
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

    @transfers("TO_ALL_FROM_FIRST")
    def publish_weights(self) -> WeightManifest | None:
        """Store the current weights in Ray's object store, for `load_weights` of a ScorerWorker."""
        tensors, manifest = iter(self._trainer.full_state()), None
        if self._context.rank == 0:
            bucket_bytes = self._config.weights.bucket_bytes
            manifest = publish_version(
                tensors,
                version=self._version,
                bucket_bytes=bucket_bytes,
                writer=ObjectStoreWriter(RAY_ACCESS.put_object),
            )
        for _ in tensors:  # gathering a sharded parameter is a collective
            pass
        return manifest

    def _train_step(self, batch: Batch) -> TrainResult:
        """Run a training step on this rank's share of a batch, with all its updates.

        Returns the sums over all ranks, and the mean metrics of the updates.
        """
        groups, settings = map_groups_by_uid(batch), self._config.algorithm_settings
        self._trainer.plan_step(groups, dict(zip(groups, batch[DERIVED_COLUMN], strict=True)))
        scheduler = StepScheduler(
            UpdatePlan(settings.scope == "step", settings.epochs, settings.mini_batches),
            world_size=self._trainer_config.dp_size,
            micro_batch_tokens=self._config.pipeline.micro_batch_tokens,
        )
        for uid, columns in groups.items():
            scheduler.add_group(uid, columns["lengths"].tolist())
        dp_rank = self._trainer_config.get_dp_rank(self._context.rank)
        rounds = [
            (scheduled, picks, {uid: groups[uid] for uid, _ in picks})
            for scheduled in scheduler.take_rounds(complete=True)
            for picks in [scheduled.micro_batches[dp_rank]]
        ]
        if self._role == POLICY and settings.should_recompute_logprobs:
            for scheduled, picks, own_groups in rounds:
                if scheduled.epoch == 0:
                    self._trainer.precompute_logprobs(own_groups, picks)
            self._trainer.sync_plan()
        step_sums, update_sums, updates = dict[str, float](), dict[str, float](), []
        for scheduled, picks, own_groups in rounds:
            add_metric_sums(
                update_sums, self._trainer.train_micro_batch(own_groups, picks, self._version)
            )
            if scheduled.is_last_of_update:
                update_sums = self._sum_over_ranks(update_sums)
                updates.append(
                    self._trainer.step(self._trainer.compute_loss_denominator(update_sums))
                )
                add_metric_sums(step_sums, update_sums)
                update_sums = {}
        return step_sums, average_metrics(updates)

    def _sum_over_ranks(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the sums over all data-parallel ranks; a collective.

        Tensor-parallel ranks have equal sums, so only the first of each counts.
        """
        total, tp_size = dict[str, float](), self._trainer_config.tensor_parallel
        for rank_sums in self._all_gather(dict(sums), "sums")[::tp_size]:
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
        memory = check_worker_memory(config, on_gpu=on_gpu)
        assert memory is not None  # a loop's config is colocated
        self._worker_memory = memory
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

    @transfers("TO_ALL_FROM_FIRST")
    def update_policy(self, batch: Batch) -> Metrics:
        """Train the policy on a batch, load the new weights into the generator, return metrics.

        During critic warm-up (critic.warmup_alone) the policy stays unchanged.
        """
        groups, adaptive_params = map_groups_by_uid(batch), dict(self._adaptive_params.values)
        rollouts = [(uid, i) for uid, group in groups.items() for i in range(len(group["lengths"]))]
        rollout_sums = sum_rollouts(groups, rollouts)
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
            metrics |= (
                summarise_policy(sums, self._settings.compute_loss_denominator(sums)) | updates
            )
        metrics |= {f"dial/{name}": value for name, value in adaptive_params.items()}
        return {**metrics, **transfer_metrics, **self._gather_memory_peaks()}

    @transfers("TO_ALL_FROM_FIRST")
    def save_model(self, folder: Path) -> None:
        """Write the policy as a Hugging Face directory, on the node of rank 0."""
        self._trainer.save_model(folder)

    async def _start_generator(self) -> None:
        if self._worker_memory.offloads_optimizer:
            self._trainer.offload_optimizer()
        self._generator = await RealEngineFactory().make_generator(
            self._config, self._max_length, self._context.rank
        )
        await self._shared_weights.attach_generator(
            self._generator, should_fill_storage=self._config.needs_resharding
        )
        self._shared_weights.publish_version(self._trainer, self._version)
        await self._load_version()

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
        fetched, load_stats = await self._load_version()
        return result, {
            "weights/bytes": float(fetched.num_bytes),
            "weights/copied_bytes": float(fetched.copied_bytes + load_stats.copied_bytes),
        }

    async def _load_version(self) -> tuple[FetchedWeights, WeightLoadStats]:
        """Switch the generator to the trainer's current weights.

        Runs the logprob check if due (weights.probe_every).
        """
        manifest = WeightManifest(self._version, (), ())
        if is_logprob_check_due(self._version, every=self._config.weights.probe_every):
            logprob_check = make_logprob_check(
                self._trainer, self._config, max_length=self._max_length
            )
            manifest = replace(manifest, logprob_check=logprob_check)
        fetched = self._shared_weights.fetch_version(self._version)
        load_stats = await self._shared_weights.load_weights(fetched.tensors, self._version)
        name = f"generator-{self._context.rank}"
        await verify_weights(self._generator, name, manifest, load_stats.verification)
        return fetched, load_stats

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


class CriticWorker(TrainedWorker):
    """Worker of a critic rank; the role selects the critic of rewards or of costs."""

    def __init__(
        self, context: WorkerContext, config: RunConfig, max_length: int, role: str = CRITIC
    ) -> None:
        super().__init__(context, config, max_length, role)
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

    @transfers("TO_ALL_FROM_FIRST")
    def update_critic(self, batch: Batch) -> Metrics:
        """Train the critic on a batch; return metrics."""
        sums, updates = self._train_step(batch)
        self._version += 1
        return summarise_critic(sums, self._role) | updates


class ScorerWorker:
    """Worker that scores groups in a role as a scorer of the stream does.

    role: reward, cost, reference, value or cost_value. The last three have a model of their own,
    which starts as the policy or the critic of the config; `load_weights` changes its weights.
    """

    def __init__(
        self, context: WorkerContext, config: RunConfig, max_length: int, role: str
    ) -> None:
        self._calls = [c for c in SOURCE_CALLS if (c.role, c.kind) == (role, CallKind.SCORE)]
        if not self._calls:
            roles = dict.fromkeys(c.role for c in SOURCE_CALLS if c.kind is CallKind.SCORE)
            raise ConfigError(f"ScorerWorker: role={role}: must be one of {', '.join(roles)}")
        self._role = role
        self._loop = asyncio.Runner()
        self._scorer = self._loop.run(RealEngineFactory().make_scorer(config, max_length, role))

    @transfers("DP")
    def score(self, batch: Batch) -> dict[str, list[Array]]:
        """Compute the columns of every stage of the role whose required columns the batch has.

        A reward scorer scores rollouts, greedy completions (column greedy_ids) or both.
        """
        calls = [call for call in self._calls if batch.keys() >= {*call.needs}]
        if not calls:
            needs = " or ".join(", ".join(call.needs) for call in self._calls)
            raise ValueError(f"the batch lacks columns: a {self._role} scorer needs {needs}")
        scored: dict[str, list[Array]] = {}
        for call in calls:
            scored |= self._score_stage(call, batch)
        return scored

    @transfers("ONE_TO_ALL")
    def load_weights(self, weights: WeightManifest) -> None:
        """Load the weights that `publish_weights` of a trained worker returned."""
        follower = self._scorer.follower
        if follower is None:
            raise ConfigError(f"load_weights: a {self._role} scorer has no model of its own")
        reader = ObjectStoreReader(self._role, RAY_ACCESS.fetch_objects)
        tensors = unpack_tensors(weights, reader.fetch_buckets(weights))
        self._loop.run(_await_result(follower.load_weights(tensors, weights.version)))

    def _score_stage(self, call: ModelCall, batch: Batch) -> dict[str, list[Array]]:
        if self._scorer.follower is None:
            groups = zip(batch[PROMPT_COLUMN], get_group_columns(batch), strict=True)
            return to_batch(self._score_groups(call.stage, list(groups)))
        # A model reads no prompts, and has the fewest micro-batches if all groups are one.
        (name,) = call.produces

        def compute(columns: Columns) -> Array:
            return self._score_groups(call.stage, [(None, columns)])[0][name]

        return {name: compute_concatenated(batch, compute)}

    def _score_groups(
        self, stage: str, groups: Sequence[tuple[Prompt | None, Columns]]
    ) -> list[Columns]:
        experiences = [
            Experience(
                GroupLease(0, prompt.uid if prompt else "", stage, 0, float("inf")),
                0,
                prompt=prompt,
                columns=columns,
            )
            for prompt, columns in groups
        ]
        results = self._loop.run(_await_result(self._scorer.stages[stage](experiences)))
        for result in results:
            if isinstance(result, StreamError):
                raise result
        return list(results)


async def _await_result(results: Any) -> Any:
    return await results


def _average_scores(sums: Mapping[str, float]) -> Metrics:
    names = {"score_sum": "reward/mean", "cost_sum": "cost/mean"}
    return {mean: sums[name] / sums["rollouts"] for name, mean in names.items() if name in sums}
