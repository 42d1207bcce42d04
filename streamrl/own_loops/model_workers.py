"""Workers with real engines for own loops: policy, critics, reference, rewards, costs.

A row of a batch is a group, with a cell for its prompt and a cell per column of
`messages.COLUMN_SPECS`. Advantages and returns of a group form the column `derived`.

Scoring splits a batch by rows. An update receives the whole batch on every rank, since advantages
may compare all groups of a step; the ranks share the rollouts by length without padding. So the
result does not depend on the number of ranks.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streamrl.actors.coordination.trainer_group import ParallelTrainer
from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.actors.shared_weights import SharedWeights
from streamrl.actors.trainer import make_logprob_check, prove_rank_files, run_saves
from streamrl.actors.transport.ray_calls import set_rendezvous
from streamrl.algorithms import list_derivation_columns, list_required_columns, summarize_policy
from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.algorithms.math.training_metrics import summarize_critic
from streamrl.buffer.micro_batch_schedule import MicroBatch, Round, ScheduledRound
from streamrl.config.preflight import check_worker_memory
from streamrl.config.role_counts import with_placement_mode
from streamrl.config.run_config import RunConfig, with_settings
from streamrl.dataflow import (
    CRITIC,
    CRITIC_BY_COLUMN,
    GENERATE_CALL,
    GREEDY_CALL,
    POLICY,
    REF_LOGPROBS,
    REFERENCE_CALL,
    REWARD_ROLES,
    SERVING_ROLES,
    SOURCE_CALLS,
    CallKind,
    ModelCall,
)
from streamrl.distributed.devices import has_local_gpu
from streamrl.engines.memory.peak_memory import release_large_blocks_eagerly
from streamrl.engines.memory.worker_memory import WorkerMemory
from streamrl.engines.trainer_config import LOAD_TIMEOUT_S, SAVE_TIMEOUT_S
from streamrl.engines.training.collate import derive_columns
from streamrl.engines.training.model_rank import ModelRank
from streamrl.engines.training.model_trainer import PROXIMAL_COLUMN
from streamrl.engines.training.rollout_sums import sum_rollouts
from streamrl.errors import ConfigError, StreamError
from streamrl.files.file_proofs import FileProof
from streamrl.files.typed_settings import Conflict, check_conflicts
from streamrl.messages import (
    COLUMN_SPECS,
    OPTIONAL_COLUMNS,
    REF_TOP_IDS,
    Array,
    Columns,
    Experience,
    Prompt,
    count_samples,
    is_component_column,
)
from streamrl.own_loops import Batch, WorkerContext, transfers
from streamrl.pipeline import verify_weights
from streamrl.run_dir.checkpoint import get_role_dirs
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import TrainStepResult
from streamrl.stream.step_metrics import average_metrics, compute_score_metrics
from streamrl.stream.train_step import ReadyRounds, RoundRunner, make_scheduler
from streamrl.weights import WeightManifest
from streamrl.weights.versions import is_logprob_check_due


def set_world_size(config: RunConfig, ranks: int) -> RunConfig:
    """Return the config with trainer.world_size set to a number of ranks.

    Sets the critic's world size too if the config has one.
    """
    settings = {"trainer.world_size": ranks}
    if "world_size" in config.critic.trainer:
        settings["critic.trainer.world_size"] = ranks
    return with_settings(config, settings)


def make_loop_config(config: RunConfig, ranks: int) -> RunConfig:
    """Return the config of PolicyWorkers on `ranks` ranks: each worker trains and samples.

    Raises ConfigError for settings that have no effect in an own loop or are not supported there.
    """
    is_split = config.generator.tensor_parallel > 1
    is_idle = config.critic.replicas and config.critic.shadow.world_size == 1
    is_placed = config.placement.mode not in ("auto", "colocated")
    looks_first = config.algorithm.spec.reads_score_norms
    is_adaptive = config.data.sampling != "uniform"
    has_mask = bool(config.generator.sampling_mask)
    replays = config.algorithm.router_replay != "off"
    conflicts: list[Conflict] = [
        (config.filter.is_enabled, "filter.kind", "an own loop filters no groups"),
        (config.reference.every, "reference.every", "an own loop has a fixed reference"),
        (is_split, "generator.tensor_parallel", "an own loop generates with whole models"),
        (config.environment.is_enabled, "environment.path", "an own loop samples single turns"),
        (is_idle, "critic.replicas", "the script of an own loop starts scorers of values; set 0"),
        (bool(config.data.replay), "data.replay", "an own loop has no queue; remove it"),
        (is_adaptive, "data.sampling", "an own loop reports no pass rates; set uniform"),
        (looks_first, "algorithm.name", "its advantages need a pass that own loops do not run"),
        (has_mask, "generator.sampling_mask", "an own loop samples from all words; leave it out"),
        (replays, "algorithm.router_replay", "an own loop has no column of experts; set off"),
        (
            REF_TOP_IDS in config.algorithm.spec.columns,
            "algorithm.name",
            "in an own loop the reference scores sampled tokens alone; set distill",
        ),
        (is_placed, "placement.mode", "an own loop trains and generates in the same workers"),
    ]
    rows = "an own loop gives each rank rows of its own; set 1"
    layouts = {"trainer": vars(config.trainer), "critic.trainer": config.critic.trainer}
    scorers = {layout.section: vars(layout) for layout in (config.reference, config.critic.shadow)}
    for name, splits in (("sequence_parallel", layouts | scorers), ("tensor_parallel", scorers)):
        for section, layout in splits.items():
            conflicts.append((layout.get(name, 1) > 1, f"{section}.{name}", rows))
    check_conflicts(config, conflicts)
    for role in REWARD_ROLES:
        if split := config.find_split_reward(role):
            size = split.options.world_size
            raise ConfigError(f"{split.key}.world_size={size}: an own loop has whole ones; set 1")
    return with_placement_mode(set_world_size(config, ranks), "colocated")


PROMPT_COLUMN = "prompt"
DERIVED_COLUMN = "derived"


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


def check_columns(batch: Batch, names: Iterable[str]) -> None:
    """Raise ValueError unless the batch has all columns, and its prompts."""
    if missing := sorted({PROMPT_COLUMN, *names} - batch.keys()):
        raise ValueError(f"the batch lacks {', '.join(missing)}; it has {', '.join(batch)}")


def map_groups_by_uid(batch: Batch) -> dict[str, Columns]:
    """Return the columns of each group of a batch, by uid; ValueError for a repeated group."""
    uids = [prompt.uid for prompt in batch[PROMPT_COLUMN]]
    if len(set(uids)) < len(uids):
        duplicate = next(uid for uid in uids if uids.count(uid) > 1)
        raise ValueError(
            f"prompt {duplicate} occurs twice in the batch; a step trains a group once"
        )
    return dict(zip(uids, get_group_columns(batch), strict=True))


def score_batch(
    model: ModelRank, batch: Batch, column: str, config: RunConfig
) -> dict[str, list[Array]]:
    """Return a column that a model computes, with an entry per token, for the groups of a batch."""
    groups, budget = get_group_columns(batch), config.pipeline.micro_batch_tokens
    return {column: model.compute_columns(groups, column, micro_batch_tokens=budget)}


class UninterruptedStep:
    """Control of a training step that nothing abandons and no publish delays."""

    def should_abandon_step(self, *, needs_s: float = 0.0) -> bool:
        return False

    async def begin_update(self, role: str, *, finishes_step: bool) -> bool:
        return True


class RankTrainer(ParallelTrainer):
    """Trainer of this process, one of the ranks of a model, which all run the same steps.

    Each rank has all groups of a step in memory and trains its micro-batch of every round.
    """

    def __init__(self, role: str, config: RunConfig, max_length: int, rank: int) -> None:
        super().__init__(role, config)
        trainer_config = config.get_trainer_config(role)
        self._pipeline = config.pipeline
        self._dp_rank = trainer_config.get_dp_rank(rank)
        self.model = RealEngineFactory().make_trainer(config, max_length, rank, role)

    async def train_step(
        self,
        groups: Mapping[str, Columns],
        derived: Mapping[str, Columns],
        version: int,
        adaptive_params: Mapping[str, float],
    ) -> TrainStepResult:
        """Run a training step with all its updates; all ranks must call it with the same groups.

        derived: derived columns of each group, by uid.
        """
        self._groups, self._derived = groups, derived
        self.begin_step(version, adaptive_params)
        scheduler = make_scheduler(self, self._pipeline)
        for uid, columns in groups.items():
            scheduler.add_group(uid, columns["lengths"].tolist(), count_samples(columns).tolist())
        ready = ReadyRounds({self.role: scheduler.take_rounds(complete=True)}, list(groups))
        runner = RoundRunner(self, UninterruptedStep(), DedicatedDeviceLease())
        await runner.run_rounds(self.role, ready)
        return runner.result

    async def plan_step(self, uids: Sequence[str], rounds: Sequence[ScheduledRound]) -> None:
        """Prepare the training step with the derived columns of its groups."""
        self.model.set_adaptive_params(self._adaptive_params)
        self.model.plan_step(self._groups, self._derived)
        if to_precompute := self.select_precomputed(rounds):
            for micro_batches in to_precompute:
                picks = micro_batches[self._dp_rank]
                self.model.precompute_logprobs(self._select_groups(picks), picks, self._version)
            self.model.sync_plan()

    async def train_round(self, micro_batches: Round, *, epoch: int) -> Mapping[str, float]:
        """Train this rank's micro-batch; return the sums over all ranks."""
        picks = micro_batches[self._dp_rank]
        groups = self._select_groups(picks)
        sums = self.model.train_micro_batch(groups, picks, self._version, epoch=epoch)
        return self.sum_over_ranks(self.model.gather_objects(sums, "sums"))

    async def apply_update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Run the optimizer step. sums: sums of all rounds of the update."""
        return self.model.update(self.model.compute_loss_denominator(sums), self._version)

    def _select_groups(self, picks: MicroBatch) -> dict[str, Columns]:
        return {uid: self._groups[uid] for uid, _ in picks}


Metrics = dict[str, float]


class SavedRank(NamedTuple):
    """Files of a checkpoint that a rank has written, with their proofs.

    version: number of the role's training steps. dials: values of adaptive parameters.
    """

    role: str
    version: int
    proofs: Mapping[Path, FileProof]
    dials: Mapping[str, float]


class TrainedWorker:
    """Base class of workers that train: a rank of the policy or of a critic."""

    configured_as = POLICY
    """Role with whose settings the ranks train; critics of rewards and of costs have the same."""

    def __init__(
        self, context: WorkerContext, config: RunConfig, max_length: int, role: str
    ) -> None:
        self._max_length = max_length
        self._config = config = make_loop_config(config, context.size)
        self._context = context
        spec, settings = config.algorithm.spec, config.algorithm_settings
        self._required_columns = list_required_columns(spec, settings)
        trainer_config = config.get_trainer_config(role)
        dp_ranks = [trainer_config.get_dp_rank(rank) for rank in range(context.size)]
        mesh_ranks = [(at.dp_rank, at.pp_rank) for at in context.mesh.train.coordinates]
        if mesh_ranks != [(dp_rank, 0) for dp_rank in dp_ranks]:
            size, section = trainer_config.tensor_parallel, trainer_config.section
            raise ConfigError(
                f"{section}.tensor_parallel={size}: the mesh of the {role} must be"
                f" RankGrid(1, {size}, {trainer_config.fsdp_size})"
            )
        set_rendezvous(context.address, context.port)
        self._trainer = RankTrainer(role, config, max_length, context.rank)
        self._version = 0

    @transfers("ONE_TO_ALL", timeout_s=SAVE_TIMEOUT_S)
    def save_state(self, checkpoint_dir: Path) -> SavedRank:
        """Write this rank's files of a checkpoint: model, optimizer and random state."""
        role, rank, model = self._trainer.role, self._context.rank, self._trainer.model
        model_dir, trainer_dir = get_role_dirs(checkpoint_dir, role)
        run_saves(
            [partial(model.save_training_state, trainer_dir), partial(model.save_model, model_dir)]
        )
        return SavedRank(
            role, self._version, prove_rank_files(model_dir, trainer_dir, rank), dials={}
        )

    @transfers("TO_ALL_FROM_FIRST", timeout_s=LOAD_TIMEOUT_S)
    def load_state(
        self, checkpoint_dir: Path, versions: Mapping[str, int], dials: Mapping[str, float]
    ) -> str:
        """Load the state that all ranks saved, on as many ranks or others; return the role.

        versions: of the checkpoint's trained roles. dials: values of adaptive parameters.
        """
        role = self._trainer.role
        if role not in versions:
            raise ConfigError(f"{checkpoint_dir}: has no {role}, which this loop trains")
        self._trainer.model.load_training_state(get_role_dirs(checkpoint_dir, role)[1])
        self._version = versions[role]
        return role

    def offload(self) -> None:
        """Free the device memory of the optimizer's state until the next update."""
        self._trainer.model.offload_optimizer()

    async def _train_batch(
        self, batch: Batch, adaptive_params: Mapping[str, float]
    ) -> TrainStepResult:
        """Run a training step on this rank's share of a batch."""
        groups = map_groups_by_uid(batch)
        derived = dict(zip(groups, batch[DERIVED_COLUMN], strict=True))
        if PROXIMAL_COLUMN in batch:
            for uid, logprobs in zip(groups, batch[PROXIMAL_COLUMN], strict=True):
                # A copy: arrays of Ray's store are read-only.
                derived[uid] = {**derived[uid], PROXIMAL_COLUMN: np.array(logprobs)}
        return await self._trainer.train_step(groups, derived, self._version, adaptive_params)


class PolicyWorker(TrainedWorker):
    """Worker of a policy rank: a trainer and a generator that share the weights in place.

    max_length: maximum tokens of prompt and completion together.
    """

    def __init__(self, context: WorkerContext, config: RunConfig, max_length: int) -> None:
        config, on_gpu = make_loop_config(config, context.size), has_local_gpu()
        if on_gpu and config.generator.kv_cache_mb is None:
            raise ConfigError(
                "generator.kv_cache_mb=null: must be set where a generator shares a GPU, here with"
                " its trainer; otherwise the KV cache takes all free memory"
            )
        memory = check_worker_memory(config, on_gpu=on_gpu)
        assert memory is not None  # a loop's config is colocated
        if config.placement.memory_mb is not None:
            release_large_blocks_eagerly()
        self._shared_weights = SharedWeights()
        super().__init__(context, config, max_length, POLICY)
        self._settings = self._config.algorithm_settings
        self._adaptive_params = AdaptiveParams(config.algorithm.spec, self._settings)
        self._loop, self._num_published = asyncio.Runner(), 0
        self._loop.run(self._start_generator(memory))

    @transfers("P3D_ALL_MICRO_DP")
    def generate_sequences(self, batch: Batch) -> dict[str, list[Array]]:
        """Sample a group of rollouts for each prompt of the batch; return ROLLOUT_COLUMNS."""
        return self._sample_groups(GENERATE_CALL.stage, batch[PROMPT_COLUMN])

    @transfers("P3D_ALL_MICRO_DP")
    def generate_greedy(self, batch: Batch) -> dict[str, list[Array]]:
        """Decode a greedy completion for each prompt of the batch; return the column greedy_ids."""
        return self._sample_groups(GREEDY_CALL.stage, batch[PROMPT_COLUMN])

    @transfers("P3D")
    def compute_logprobs(self, batch: Batch) -> dict[str, list[Array]]:
        """Compute the policy's logprob of each token; return the column proximal_logprobs.

        With algorithm.correction.proximal=trainer, `update_policy` clips against this column if the
        batch has it, and otherwise computes it itself where a step has several updates.
        """
        return self._score(batch, PROXIMAL_COLUMN)

    @transfers("P3D")
    def score(self, batch: Batch) -> dict[str, list[Array]]:
        """Compute the logprobs of LoRA's reference, the model below the adapters, as ref_logprobs.

        Raises ConfigError if the reference is another model.
        """
        if REFERENCE_CALL.role not in self._config.hosts:
            raise ConfigError("PolicyWorker.score: it has no reference: use start_reference")
        return self._score(batch, REF_LOGPROBS)

    @transfers("RANK_ZERO")
    def compute_advantages(self, batch: Batch) -> dict[str, list[Columns]]:
        """Compute advantages and returns of all groups of a step; return the column derived."""
        spec = self._config.algorithm.spec
        settings = self._settings.with_adaptive_params(self._adaptive_params.values)
        columns = {*list_derivation_columns(spec, settings)} - {*OPTIONAL_COLUMNS}
        check_columns(batch, columns)
        derived = derive_columns(spec, settings, map_groups_by_uid(batch))
        return {DERIVED_COLUMN: list(derived.values())}

    @transfers("TO_ALL_FROM_FIRST")
    def update_policy(self, batch: Batch) -> Metrics:
        """Train the policy on a batch, load the new weights into the generator, return metrics.

        During critic warm-up (critic.warmup_alone) the policy stays unchanged.
        """
        check_columns(batch, [DERIVED_COLUMN, *self._required_columns])
        groups, adaptive_params = map_groups_by_uid(batch), dict(self._adaptive_params.values)
        rollouts = [(uid, i) for uid, group in groups.items() for i in range(len(group["lengths"]))]
        derived = dict(zip(groups, batch[DERIVED_COLUMN], strict=True))
        sums = sum_rollouts(groups, rollouts, derived)
        metrics = compute_score_metrics(sums)
        result, transfer_metrics = self._loop.run(self._train_next_version(batch, adaptive_params))
        if result:
            sums |= result.metric_sums
            self._adaptive_params.update_after_step(sums)
            metrics |= summarize_policy(sums, self._settings.compute_loss_denominator(sums))
            metrics |= average_metrics(result.update_metrics)
        metrics |= {f"dial/{name}": value for name, value in adaptive_params.items()}
        return {**metrics, **transfer_metrics, **self._gather_memory_peaks()}

    @transfers("TO_ALL_FROM_FIRST", timeout_s=SAVE_TIMEOUT_S)
    def save_model(self, folder: Path) -> None:
        """Write the policy as a Hugging Face directory, on the node of rank 0."""
        self._trainer.model.save_model(folder)

    @transfers("ONE_TO_ALL", timeout_s=SAVE_TIMEOUT_S)
    def save_state(self, checkpoint_dir: Path) -> SavedRank:
        save = partial(super().save_state, checkpoint_dir)

        async def save_whole_state() -> SavedRank:
            async with self._shared_weights.hold_whole_state():
                return save()

        saved = self._loop.run(save_whole_state())
        return saved._replace(dials=self._adaptive_params.state_dict())

    @transfers("TO_ALL_FROM_FIRST", timeout_s=LOAD_TIMEOUT_S)
    def load_state(
        self, checkpoint_dir: Path, versions: Mapping[str, int], dials: Mapping[str, float]
    ) -> str:
        load = partial(super().load_state, checkpoint_dir, versions, dials)
        self._adaptive_params.load_state_dict(dials)

        async def load_next_state() -> str:
            await self._shared_weights.invalidate_weights()
            async with self._shared_weights.run_training_phase():
                role = load()
                manifest = self._publish_version()
            await self._load_version(manifest)
            return role

        return self._loop.run(load_next_state())

    def offload(self) -> None:
        """Free the generator's KV cache until it samples, and the optimizer's state."""
        self._loop.run(self._generator.sleep())
        super().offload()

    async def _start_generator(self, memory: WorkerMemory) -> None:
        await self._shared_weights.attach_trainer(self._trainer.model, memory)
        self._generator = await RealEngineFactory().make_generator(
            self._config, self._max_length, self._context.rank
        )
        await self._shared_weights.attach_generator(
            self._generator, should_fill_storage=self._config.needs_resharding
        )
        await self._load_version(self._publish_version())

    async def _train_next_version(
        self, batch: Batch, adaptive_params: Mapping[str, float]
    ) -> tuple[TrainStepResult | None, Metrics]:
        """Train on the batch, and switch the generator to the resulting version.

        During critic warm-up the weights stay the same and the result is None. Also returns the
        bytes moved and copied for the weights as metrics.
        """
        result = None
        await self._shared_weights.invalidate_weights()
        trains = not self._trainer.is_frozen(self._version)
        async with self._shared_weights.run_training_phase(may_release_kv=trains):
            if trains:
                result = await self._train_batch(batch, adaptive_params)
            self._version += 1
            manifest = self._publish_version()
        return result, await self._load_version(manifest)

    def _score(self, batch: Batch, column: str) -> dict[str, list[Array]]:
        self._check_weights()

        async def compute() -> dict[str, list[Array]]:
            async with self._shared_weights.run_training_phase():
                return score_batch(self._trainer.model, batch, column, self._config)

        return self._loop.run(compute())

    def _check_weights(self) -> None:
        if self._shared_weights.is_changing:
            raise StreamError(
                "the last update failed midway; the weights are inconsistent, cannot sample or"
                " score"
            )

    def _publish_version(self) -> WeightManifest:
        """Declare the current weights a version; add a logprob check to the manifest if due."""
        logprob_check = None
        if is_logprob_check_due(self._num_published, every=self._config.weights.probe_every):
            logprob_check = make_logprob_check(
                self._trainer.model, self._config, max_length=self._max_length
            )
        manifest = self._shared_weights.publish_version(self._version)
        self._num_published += 1
        return replace(manifest, logprob_check=logprob_check)

    async def _load_version(self, manifest: WeightManifest) -> Metrics:
        """Switch the generator to a published version and check it; return the bytes as metrics."""
        version, weights = manifest.version, self._shared_weights
        fetched = weights.fetch_version(version)
        loaded = await weights.load_weights(fetched.tensors, version)
        name = f"generator-{self._context.rank}"
        await verify_weights(weights, name, manifest, loaded.verification)
        return {
            "weights/bytes": float(fetched.num_bytes),
            "weights/copied_bytes": float(fetched.copied_bytes + loaded.copied_bytes),
        }

    def _gather_memory_peaks(self) -> Metrics:
        """Return the memory peak of each phase over all ranks, MiB; a collective."""
        peaks: Metrics = {}
        for rank_peaks in self._trainer.model.gather_objects(
            self._shared_weights.peak_memory.drain_peaks(), "peaks of memory"
        ):
            for phase, peak_mb in rank_peaks.items():
                name = f"memory/{phase}_mb"
                peaks[name] = max(peaks.get(name, 0.0), peak_mb)
        return peaks

    def _sample_groups(self, stage: str, prompts: Sequence[Prompt]) -> dict[str, list[Array]]:
        """Sample the rollouts of all prompts concurrently in a generation stage; return columns."""
        # The generator stays paused until a version is activated, so sampling would hang.
        self._check_weights()
        sample = self._generator.stages[stage]

        async def sample_all() -> list[Columns]:
            return await asyncio.gather(*(sample(prompt) for prompt in prompts))

        return to_batch(self._loop.run(sample_all()))


class CriticWorker(TrainedWorker):
    """Worker of a critic rank; the role selects the critic of rewards or of costs."""

    configured_as = CRITIC

    def __init__(
        self, context: WorkerContext, config: RunConfig, max_length: int, role: str = CRITIC
    ) -> None:
        super().__init__(context, config, max_length, role)
        (self._column,) = (column for column, critic in CRITIC_BY_COLUMN.items() if critic == role)

    @transfers("P3D")
    def compute_values(self, batch: Batch) -> dict[str, list[Array]]:
        """Compute the value of each token; return the column values, or cost_values for costs."""
        return score_batch(self._trainer.model, batch, self._column, self._config)

    @transfers("TO_ALL_FROM_FIRST")
    def update_critic(self, batch: Batch) -> Metrics:
        """Train the critic on a batch; return metrics."""
        check_columns(batch, [DERIVED_COLUMN, *self._required_columns])
        result = asyncio.run(self._train_batch(batch, {}))
        self._version += 1
        metrics = summarize_critic(result.metric_sums, self._trainer.role)
        return metrics | average_metrics(result.update_metrics)


class ScorerWorker:
    """Worker that scores groups in a role as a scorer of the stream does.

    role: reward, cost, reference, value or cost_value. The last three have a model of their own,
    the policy or the critic that the config starts from: a whole one each, or its part of one where
    the role's world_size is that of the group. With LoRA a policy has the reference itself:
    `OwnLoop.start_reference`.
    """

    def __init__(
        self, context: WorkerContext, config: RunConfig, max_length: int, role: str
    ) -> None:
        self._calls = [c for c in SOURCE_CALLS if (c.role, c.kind) == (role, CallKind.SCORE)]
        if not self._calls:
            roles = dict.fromkeys(c.role for c in SOURCE_CALLS if c.kind is CallKind.SCORE)
            raise ConfigError(f"ScorerWorker: role={role}: must be one of {', '.join(roles)}")
        self._role, self._config = role, config
        self._loop, engines = asyncio.Runner(), RealEngineFactory()
        if role in REWARD_ROLES:
            self._scorer = self._loop.run(engines.make_reward_scorer(config, role))
            return
        world_size = config.get_ranks_config(self._calls[0]).world_size
        is_misfit, size = world_size not in (1, context.size), f"the group has {context.size} ranks"
        check_conflicts(config, [(is_misfit, SERVING_ROLES[role].ranks, size)])
        set_rendezvous(context.address, context.port)
        rank = context.rank if world_size > 1 else 0
        self._model = engines.make_scoring_rank(config, max_length, rank, self._calls[0])

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

    def _score_stage(self, call: ModelCall, batch: Batch) -> dict[str, list[Array]]:
        if self._role not in REWARD_ROLES:
            return score_batch(self._model, batch, call.produces[0], self._config)
        groups = zip(batch[PROMPT_COLUMN], get_group_columns(batch), strict=True)
        experiences = [Experience.make_unqueued(columns, prompt) for prompt, columns in groups]
        results = self._loop.run(_await_result(self._scorer.functions[call.stage](experiences)))
        for result in results:
            if isinstance(result, StreamError):
                raise result
        return to_batch(list(results))


async def _await_result(results: Any) -> Any:
    return await results
