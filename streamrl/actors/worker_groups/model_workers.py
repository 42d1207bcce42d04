"""Workers with real engines, for loops of one's own: policy, critics, reference, rewards, costs.

A row of their batches is a group: a cell for its prompt, and one for each of its columns, by the
names of `messages.SCHEMA`. What a row derives from groups, advantages and returns, is the column
`derived`. Scoring is handed out by rows. An update is handed out whole: advantages may compare all
groups of a step, and rollouts are dealt to ranks by their lengths, each of them once, so that
neither padding nor the number of ranks has a say in it.
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

from streamrl.actors.engine_factory import RealEngines
from streamrl.actors.launch.fork_server import GENERATOR, STAGE_ENV, level_env
from streamrl.actors.shared_weights import Residence
from streamrl.actors.trainer import probe_of
from streamrl.algorithms import step_normaliser, summarise
from streamrl.algorithms.adaptive_params import Dials
from streamrl.algorithms.math.step_metrics import summarise_critic
from streamrl.buffer.assembly.micro_batch_schedule import Pace, Schedule
from streamrl.buffer.assembly.packing import Pick, pack
from streamrl.config import RunConfig
from streamrl.config.preflight import hybrid_memory
from streamrl.config.role_counts import placed
from streamrl.controller import PROTOCOLS, Batch, Place, add_protocol, transfers
from streamrl.dataflow import (
    BASELINE,
    COST,
    CRITIC,
    CRITICS,
    GENERATE,
    GREEDY,
    POLICY,
    REWARD,
    SEQUENCES,
)
from streamrl.distributed.process_group import deadline
from streamrl.engines.generation.pending_requests import nobody
from streamrl.engines.memory.peak_memory import give_back_freed, give_back_large_at_once
from streamrl.engines.models.forward import ModelOptions, local_device, token_values
from streamrl.engines.training.collate import derive_columns
from streamrl.engines.training.forward_scorers import LogprobScorer, per_token
from streamrl.engines.training.rollout_sums import rollout_sums
from streamrl.engines.vllm.environment import generation_env
from streamrl.errors import ConfigError, StreamError
from streamrl.files.hf_config import trusted_env
from streamrl.messages import SCHEMA, Array, Columns, Experience, Lease, Prompt, is_component
from streamrl.pipeline import verify_model
from streamrl.placement import WorkerMemory
from streamrl.stream.train_step import add_sums
from streamrl.weights import Loaded, WeightManifest
from streamrl.weights.logprob_probe import is_probed

PROMPT = "prompt"
DERIVED = "derived"
#: All ranks work on the whole batch together; what they agree on is told once.
TOGETHER = add_protocol(
    "TO_ALL_FROM_FIRST", PROTOCOLS["ONE_TO_ALL"].distribute, PROTOCOLS["RANK_ZERO"].collect
).name
Figures = dict[str, float]
Trained = tuple[dict[str, float], Figures]
"""What a step told: sums over all ranks, and the mean of what its updates told."""


def engine_env(config: RunConfig, *, on_gpu: bool) -> dict[str, str]:
    """Environment for the processes of the workers here."""
    own = generation_env("cuda" if on_gpu else "cpu", threads=config.generator.threads)
    accelerator = {} if on_gpu else {"DS_ACCELERATOR": "cpu"}
    trusted = trusted_env(*config.trusted_models)
    return {**STAGE_ENV, **own, **accelerator, **trusted, **level_env(GENERATOR)}


def with_ranks(config: RunConfig, ranks: int) -> RunConfig:
    """The settings for so many ranks: a group has as many as its mesh."""
    trainer, critic = replace(config.trainer, world_size=ranks), config.critic
    if "world_size" in critic.trainer:
        critic = replace(critic, trainer={**critic.trainer, "world_size": ranks})
    return replace(config, trainer=trainer, critic=critic)


def in_loop(config: RunConfig, ranks: int) -> RunConfig:
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
    return placed(with_ranks(config, ranks), "colocated")


def loop_memory(config: RunConfig, *, on_gpu: bool) -> WorkerMemory:
    """What one of these workers holds, of the settings `in_loop` gives.

    Raises ConfigError with the arithmetic if it cannot stay within placement.memory_mb.
    """
    memory = hybrid_memory(config, on_gpu=on_gpu)
    assert memory is not None
    return memory


class TrainedWorker:
    """A rank of a model that is trained, by its role."""

    def __init__(self, place: Place, config: RunConfig, max_length: int, role: str) -> None:
        self._max_length = max_length
        self._config = config = with_ranks(config, place.size)
        self._place = place
        self._layout = trainer = config.trainer_of(role)
        self._timeout_s = trainer.collective_timeout_s
        shares = [trainer.share_of(rank) for rank in range(place.size)]
        if [(at.replica, at.stage) for at in place.mesh.train.seats] != [(at, 0) for at in shares]:
            raise ConfigError(
                f"trainer.tensor_parallel={trainer.tensor_parallel}: the {role}'s mesh must be"
                f" Grid(1, {trainer.tensor_parallel}, {trainer.num_shares}) for these ranks"
            )
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place.address, str(place.port)
        self._trainer = RealEngines().trainer(config, max_length, place.rank, role)
        self._version = 0

    def _train(self, batch: Batch) -> Trained:
        """The updates of a step."""
        groups = groups_of(batch)
        self._trainer.plan(groups, dict(zip(groups, batch[DERIVED], strict=True)))
        settings, share = self._config.settings, self._layout.share_of(self._place.rank)
        pace = Pace(settings.scope == "step", settings.epochs, settings.mini_batches)
        budget = self._config.pipeline.micro_batch_tokens
        shares = self._layout.num_shares
        schedule = Schedule(pace, world_size=shares, micro_batch_tokens=budget)
        for uid, columns in groups.items():
            schedule.add(uid, columns["lengths"].tolist())
        turns = schedule.turns(complete=True)
        self._look(groups, [turn.work[share] for turn in turns if turn.epoch == 0])
        total: dict[str, float] = {}
        since: dict[str, float] = {}
        updates = []
        for turn in turns:
            picks = turn.work[share]
            own = {uid: groups[uid] for uid, _ in picks}
            add_sums(since, self._trainer.train_micro_batch(own, picks, self._version))
            if turn.ends_update:
                since = self._of_all(since)
                updates.append(self._trainer.step(self._trainer.normaliser(since)))
                add_sums(total, since)
                since = {}
        return total, _mean(updates)

    def _look(self, groups: Mapping[str, Columns], works: Sequence[Sequence[Pick]]) -> None:
        """Note what is to be known of the model before a step changes it; of a policy."""

    def _of_all(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The sums of all ranks; those that are tensor parallel have the same."""
        total: dict[str, float] = {}
        for part in self._said_by_all(dict(sums), "sums")[:: self._layout.tensor_parallel]:
            add_sums(total, part)
        return total

    def _said_by_all(self, said: Any, what: str) -> list[Any]:
        parts: list[Any] = [None] * self._place.size
        with self._in_time(what):
            dist.all_gather_object(parts, said)
        return parts

    def _in_time(self, what: str) -> AbstractContextManager[None]:
        waited = f"rank {self._place.rank} waited {self._timeout_s:g} s"
        return deadline(f"{waited} for the others' {what}")


class PolicyWorker(TrainedWorker):
    """A rank of the policy: trainer and generator in one process, on the same weights in place.

    max_length: most tokens of prompt and completion together.
    """

    def __init__(self, place: Place, config: RunConfig, max_length: int) -> None:
        config, on_gpu = in_loop(config, place.size), torch.cuda.is_available()
        if on_gpu and config.generator.kv_cache_mb is None:
            raise ConfigError(
                "generator.kv_cache_mb=null: must be set where a generator shares a GPU, here with"
                " its trainer, else the KV cache takes what there is"
            )
        self._memory = loop_memory(config, on_gpu=on_gpu)
        if config.placement.memory_mb is not None:
            give_back_large_at_once()
        self._residence = Residence()
        super().__init__(place, config, max_length, POLICY)
        self._settings = self._config.settings
        self._dials = Dials(config.algorithm.row, self._settings)
        self._loop = asyncio.Runner()
        self._loop.run(self._start())

    @transfers("P3D_ALL_MICRO_DP")
    def generate_sequences(self, batch: Batch) -> dict[str, list[Array]]:
        """The rollouts of each prompt: the columns ROLLOUT_COLUMNS."""
        return self._sample(GENERATE.stage, batch[PROMPT])

    @transfers("P3D_ALL_MICRO_DP")
    def generate_greedy(self, batch: Batch) -> dict[str, list[Array]]:
        """The likeliest completion of each prompt: the column greedy_ids."""
        return self._sample(GREEDY.stage, batch[PROMPT])

    @transfers("RANK_ZERO")
    def compute_advantages(self, batch: Batch) -> dict[str, list[Columns]]:
        """What the algorithm derives from the groups of a step: the column derived."""
        settings = self._settings.turned(self._dials.values)
        found = derive_columns(self._config.algorithm.row, settings, groups_of(batch))
        return {DERIVED: list(found.values())}

    @transfers(TOGETHER)
    def update_policy(self, batch: Batch) -> Figures:
        """Train a step, and sample from what came of it: figures by their names in the metrics.

        While a critic is warmed up alone, the policy stays as it is.
        """
        groups, dials = groups_of(batch), dict(self._dials.values)
        told = rollout_sums(groups, all_picks(groups))
        figures = _scored(told)
        self._trainer.adopt(dials)
        trains = self._version >= self._config.critic.warmup_alone
        trained, moved = self._loop.run(self._next_version(batch if trains else None))
        if trained:
            sums, updates = trained
            self._dials.after({**told, **sums}, num_rollouts=int(told["rollouts"]))
            figures |= summarise(sums, step_normaliser(self._settings, sums)) | updates
        figures |= {f"dial/{name}": value for name, value in dials.items()}
        return {**figures, **moved, **self._peaks()}

    @transfers(TOGETHER)
    def save_model(self, folder: Path) -> None:
        """Write the model as a Hugging Face directory, on rank 0's node."""
        self._trainer.save_model(folder)

    async def _start(self) -> None:
        """Have the generator beside the trainer, with its weights."""
        if self._memory.offloads_optimizer:
            self._trainer.offload_optimizer()
        starting = RealEngines().generator(self._config, self._max_length, self._place.rank)
        self._generator = await starting
        await self._residence.let_in(self._generator, fills=self._config.fills_generators)
        self._residence.publish(self._trainer, self._version)
        await self._take_up()

    async def _next_version(self, batch: Batch | None) -> tuple[Trained | None, Figures]:
        """Train a step, if there is one, and sample from the weights as they are then.

        What the step told, and the bytes that had to be moved and copied for the weights.
        """
        trained = None
        await self._residence.about_to_change()
        releases_kv = self._memory.releases_kv and batch is not None
        async with self._residence.training(releases_kv=releases_kv):
            if batch is not None:
                trained = self._train(batch)
            self._version += 1
            self._residence.publish(self._trainer, self._version)
            if self._memory.offloads_optimizer:
                self._trainer.offload_optimizer()
            give_back_freed()
        fetched = self._residence.fetched(self._version)
        loaded = await self._take_up()
        return trained, {
            "weights/bytes": float(fetched.num_bytes),
            "weights/copied_bytes": float(fetched.copied_bytes + loaded.copied_bytes),
        }

    async def _take_up(self) -> Loaded:
        """Have the generator sample from the weights as they are, once it is seen to be the same
        model."""
        manifest = WeightManifest(self._version, (), ())
        if is_probed(self._version, every=self._config.weights.probe_every):
            probe = probe_of(self._trainer, self._config, max_length=self._max_length)
            manifest = replace(manifest, probe=probe)
        loaded = await self._residence.take_up(self._generator, self._version)
        name = f"generator-{self._place.rank}"
        await verify_model(self._generator, name, manifest, loaded.arrival)
        return loaded

    def _peaks(self) -> Figures:
        """The most any rank held in each phase since the last call."""
        peaks: Figures = {}
        for part in self._said_by_all(self._residence.memory.drain(), "peaks of memory"):
            for phase, peak_mb in part.items():
                name = f"memory/{phase}_mb"
                peaks[name] = max(peaks.get(name, 0.0), peak_mb)
        return peaks

    def _sample(self, stage: str, prompts: Sequence[Prompt]) -> dict[str, list[Array]]:
        if self._residence.is_changing:
            # The generator would stand still for ever.
            raise StreamError("an update failed half-way: there are no weights to sample with")
        sample = self._generator.stages[stage]

        async def all_groups() -> list[Columns]:
            return await asyncio.gather(*(sample(prompt, None, nobody) for prompt in prompts))

        return as_batch(self._loop.run(all_groups()))

    def _look(self, groups: Mapping[str, Columns], works: Sequence[Sequence[Pick]]) -> None:
        if self._settings.looks_ahead:
            for picks in works:
                self._trainer.look({uid: groups[uid] for uid, _ in picks}, picks)
            self._trainer.settle()


class CriticWorker(TrainedWorker):
    """A rank of a critic, of rewards or of costs by its role."""

    def __init__(
        self, place: Place, config: RunConfig, max_length: int, role: str = CRITIC
    ) -> None:
        super().__init__(place, config, max_length, role)
        self._role = role
        (self._column,) = (column for column, critic in CRITICS.items() if critic == role)

    @transfers("P3D")
    def compute_values(self, batch: Batch) -> dict[str, list[Array]]:
        """A value per token of every group: the column values, or cost_values."""
        budget = self._config.pipeline.micro_batch_tokens
        lacking = self._rounds_lacking(batch)
        found = in_one(batch, lambda columns: per_token(columns, self._values, budget))
        for _ in range(lacking):
            token = torch.zeros(1, 1, dtype=torch.long, device=local_device())
            self._values({"token_ids": token, "attention_mask": token == 0})
        return {self._column: found}

    def _rounds_lacking(self, batch: Batch) -> int:
        """How many micro-batches another rank has more of, which this one has to keep company."""
        if not self._trainer.gathers:
            return 0
        lengths = [length for cells in batch["lengths"] for length in cells.tolist()]
        sized = [("", i, length) for i, length in enumerate(lengths)]
        budget = self._config.pipeline.micro_batch_tokens
        own = len(pack(sized, world_size=1, micro_batch_tokens=budget))
        return max(self._said_by_all(own, "number of micro-batches")) - own

    def _values(self, rows: Mapping[str, Any]) -> torch.Tensor:
        """Of some rows. Where no rank has all parameters, all ranks are at this together."""
        # What is gathered is kept by those who gather, and has to be good for training, too.
        with self._in_time("values"), torch.inference_mode(False), torch.no_grad():
            return token_values(self._trainer.forward, rows["token_ids"], rows["attention_mask"])

    @transfers(TOGETHER)
    def update_critic(self, batch: Batch) -> Figures:
        """Train a step on the returns: figures by their names in the metrics."""
        sums, updates = self._train(batch)
        self._version += 1
        return summarise_critic(sums, self._role) | updates


class ReferenceWorker:
    """The policy as it was when the run began."""

    def __init__(self, place: Place, config: RunConfig, max_length: int) -> None:
        self._model = LogprobScorer(
            config.model.path,
            temperature=config.generator.temperature,
            micro_batch_tokens=config.pipeline.micro_batch_tokens,
            threads=config.trainer.threads,
            dtype=config.trainer.dtype,
            options=ModelOptions(config.trainer.attention, max_length),
        )

    @transfers("DP")
    def compute_ref_logprobs(self, batch: Batch) -> dict[str, list[Array]]:
        """The column ref_logprobs."""
        name = "ref_logprobs"
        return {name: in_one(batch, lambda columns: self._model.ref_logprobs(columns)[name])}


class RewardWorker:
    """A run's rewards, or its costs where the role is that of costs."""

    def __init__(self, place: Place, config: RunConfig, role: str = REWARD.role) -> None:
        self._loop = asyncio.Runner()
        # It judges texts, whatever their length.
        self._scorer = self._loop.run(RealEngines().scorer(config, 0, role))

    @transfers("DP")
    def compute_rewards(self, batch: Batch) -> dict[str, list[Array]]:
        """The column scores, and the components they are combined from."""
        return self._judged(REWARD.stage, batch)

    @transfers("DP")
    def compute_baselines(self, batch: Batch) -> dict[str, list[Array]]:
        """What the likeliest completions would get: the column baseline_scores."""
        return self._judged(BASELINE.stage, batch)

    @transfers("DP")
    def compute_costs(self, batch: Batch) -> dict[str, list[Array]]:
        """The column costs, and the components they are combined from."""
        return self._judged(COST.stage, batch)

    def _judged(self, stage: str, batch: Batch) -> dict[str, list[Array]]:
        """Raises the error of a group that could not be judged."""
        groups = [
            Experience(
                Lease(0, prompt.uid, stage, 0, float("inf")), 0, prompt=prompt, columns=columns
            )
            for prompt, columns in zip(batch[PROMPT], columns_of(batch), strict=True)
        ]
        found = self._loop.run(_awaited(self._scorer.stages[stage](groups)))
        for result in found:
            if isinstance(result, StreamError):
                raise result
        return as_batch(found)


async def _awaited(results: Any) -> Any:
    return await results


def as_batch(groups: Sequence[Columns]) -> dict[str, list[Array]]:
    """The batch of some groups, a row each."""
    return {name: [columns[name] for columns in groups] for name in (groups[0] if groups else ())}


def columns_of(batch: Batch) -> list[Columns]:
    """The columns of every group of a batch, in the order of its rows."""
    names = [name for name in batch if name in SCHEMA or is_component(name)]
    return [
        dict(zip(names, cells, strict=True))
        for cells in zip(*(batch[name] for name in names), strict=True)
    ]


def groups_of(batch: Batch) -> dict[str, Columns]:
    """The columns of every group by uid. Raises ValueError for a group that is there twice."""
    uids = [prompt.uid for prompt in batch[PROMPT]]
    if len(set(uids)) < len(uids):
        twice = next(uid for uid in uids if uids.count(uid) > 1)
        raise ValueError(f"prompt {twice} is there twice: a step trains a group once")
    return dict(zip(uids, columns_of(batch), strict=True))


def in_one(batch: Batch, compute: Callable[[Columns], Array]) -> list[Array]:
    """A token column, a cell for each group, of what is computed of all of them laid end to end."""
    groups = columns_of(batch)
    if not groups:
        return []
    whole = {name: np.concatenate([columns[name] for columns in groups]) for name in SEQUENCES}
    ends = np.cumsum([len(columns["token_ids"]) for columns in groups])
    return np.split(compute(whole), ends[:-1])


def all_picks(groups: Mapping[str, Columns]) -> list[Pick]:
    """Every rollout of some groups."""
    return [(uid, i) for uid, columns in groups.items() for i in range(len(columns["lengths"]))]


def _scored(told: Mapping[str, float]) -> Figures:
    """What the rollouts of a step got, by rollout."""
    names = {"score_sum": "reward/mean", "cost_sum": "cost/mean"}
    return {mean: told[name] / told["rollouts"] for name, mean in names.items() if name in told}


def _mean(rows: Sequence[Mapping[str, float]]) -> Figures:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: fmean(row[name] for row in rows if name in row) for name in names}
