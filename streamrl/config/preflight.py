"""Everything that can be checked before a process is started or a file is written.

What passes here is at hand already: the stream of prompts, and the dataflow.
"""

import asyncio
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch

from streamrl.buffer.admission.staleness_credits import check_shard_bytes, max_group_bytes
from streamrl.config.cross_checks import count_trained_steps
from streamrl.config.role_counts import assign_slots, count_actors, with_placement_mode
from streamrl.config.run_config import RunConfig
from streamrl.data import (
    LoadedPrompts,
    PromptStream,
    TrainingFiles,
    load_prompt_files,
    load_texts,
    load_vocab_size,
    open_training_files,
)
from streamrl.dataflow import COST_CALL, GENERATE_CALL, POLICY, REWARD_CALL, Dataflow
from streamrl.engines.memory.memory_model import estimate_worker_memory
from streamrl.engines.models.lora import check_lora_targets
from streamrl.engines.models.supported_models import check_model_support, describe_untrained_layers
from streamrl.engines.models.tensor_parallel_support import (
    check_generator_split,
    check_tensor_parallel,
    explain_unloadable_split,
    has_experts,
)
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.vllm.model_registry import explain_unshareable_process
from streamrl.errors import ConfigError
from streamrl.files.hf_config import (
    list_weight_files,
    make_trusted_env,
    read_model_config,
    read_model_length,
    read_stored_shapes,
)
from streamrl.files.typed_settings import rename_error_section
from streamrl.messages import Prompt
from streamrl.placement import SHARED_SLOTS, PlacementOption, ResourceDemand, WorkerMemory
from streamrl.rewards import COSTS, RewardContext, build_rewards
from streamrl.rewards.group_filter import build_group_filter

GIB = 1 << 30
NUM_EXPERT_AXES = 3
"""Axes of a parameter that has the weights of all experts of a layer."""
PROCESS_GIB = 0.4
"""What an actor takes once its libraries are loaded, before any model, GiB."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that may start. `max_length`: most tokens of prompt and completion together.

    `eval_prompts`: those of each file, by its name. `components`: the columns that scores, and
    costs, are combined from. `model_bytes`: size of the model's weights as stored.
    `reward_model_bytes`: by role, that of the models that the rewards, or costs, are computed with.
    """

    dataflow: Dataflow
    prompts: PromptStream
    eval_prompts: Mapping[str, Sequence[Prompt]]
    component_columns: tuple[str, ...]
    max_length: int
    model_bytes: int
    notes: tuple[str, ...]
    reward_model_bytes: Mapping[str, int] = field(default_factory=dict)


def prepare_run(config: RunConfig) -> PreparedRun:
    """Load and check what the run reads. Raises ConfigError in one line; writes nothing."""
    os.environ.update(make_trusted_env(*config.trusted_models))
    around = RewardContext(config.scorer, config.sandbox)
    rewards = build_rewards(config.rewards, around)
    costs = [build_rewards(config.costs, around, score_spec=COSTS)] if config.costs else []
    build_group_filter(config.filter)
    model_tokens = read_model_length(config.model.path, limit=config.model.max_length)
    _check_stop_tokens(config)
    limit = config.data.compute_prompt_limit(
        model_tokens=model_tokens, max_new_tokens=config.generator.max_new_tokens
    )
    said = [asyncio.run(judges.run_preflight()) for judges in (rewards, *costs)]

    def inspect(prompts: Sequence[Prompt]) -> None:
        for judges in (rewards, *costs):
            judges.check_prompts(prompts)

    new, on_long = config.generator.max_new_tokens, config.data.on_long_prompt
    is_given = config.data.max_prompt_tokens is not None
    train = open_training_files(
        config.data.train_files,
        config.model.path,
        limit=limit,
        on_long=on_long,
        room=None if is_given else config.pipeline.micro_batch_tokens - new,
        inspect=inspect,
    )
    evaluation = load_prompt_files(
        config.data.eval_files,
        config.model.path,
        limit=limit,
        on_long=on_long,
        most=config.evaluation.limit,
    )
    inspect(evaluation.prompts)
    if config.data.pretrain:
        load_texts(config.data.pretrain)
    longest = max(
        train.max_prompt_tokens, *(len(prompt.token_ids) for prompt in evaluation.prompts), 0
    )
    max_length = longest + new
    _check_micro_batch(config, max_length)
    dataflow = config.dataflow
    for role in dataflow.trained_roles:
        section = "trainer" if role == POLICY else "critic.trainer"
        attention = config.get_trainer_config(role).attention
        is_served = role == POLICY
        key = "model.path" if is_served or not config.critic.path else "critic.path"
        model = config.get_model_path(role)
        check_model_support(model, attention, section=section, key=key, is_served=is_served)
        check_lora_targets(
            config.get_model_path(role), config.get_trainer_config(role), section=section
        )
        said.append(
            _note_frozen_experts(
                config.get_model_path(role), config.get_trainer_config(role), section
            )
        )
        _check_lr_schedule(config, role, section)
        ranks = config.get_trainer_config(role).tensor_parallel
        check_tensor_parallel(config.get_model_path(role), ranks, section=section)
    said.append(describe_untrained_layers(config.model.path))
    check_generator_split(config.model.path, config.generator.tensor_parallel)
    check_worker_memory(config, on_gpu=torch.cuda.is_available())
    return PreparedRun(
        dataflow=dataflow,
        prompts=PromptStream(
            train,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            max_bad_share=config.data.max_bad_share,
        ),
        eval_prompts=evaluation.prompts_by_name,
        component_columns=tuple(
            name for judges in (rewards, *costs) for name in judges.component_columns
        ),
        max_length=max_length,
        model_bytes=sum(file.stat().st_size for file in list_weight_files(Path(config.model.path))),
        notes=(*chain.from_iterable(said), *_collect_notes(config, train, evaluation)),
        reward_model_bytes={
            call.role: judges.model_bytes
            for call, judges in zip((REWARD_CALL, COST_CALL), (rewards, *costs), strict=False)
        },
    )


def _check_lr_schedule(config: RunConfig, role: str, section: str) -> None:
    """Raise ConfigError for a learning rate's schedule that the settings of a role do not give."""
    try:
        config.get_trainer_config(role).compute_lr(0, count_trained_steps(config, role))
    except ConfigError as error:
        if role == POLICY:
            raise
        raise rename_error_section(error, config.critic.trainer, section=section) from None


def list_placement_options(
    config: RunConfig, prepared: PreparedRun, on_gpu: bool
) -> dict[str, PlacementOption]:
    """What a run asks for in each mode it may be placed in, best first."""
    modes = [config.placement.mode]
    # Before Ray is started it has told of no GPU.
    has_gpu = on_gpu or torch.cuda.is_available()
    if modes == ["auto"]:
        modes = ["disaggregated", "colocated"]
    found: dict[str, PlacementOption] = {}
    for mode in modes:
        if mode == "colocated" and config.colocation_conflict:
            found[mode] = config.colocation_conflict
            continue
        there = with_placement_mode(config, mode)
        wanted = list_resource_demands(there, prepared, on_gpu)
        problem = (
            _find_cache_problem(there, wanted)
            or _find_budget_problem(there, has_gpu)
            or _find_serving_problem(there, has_gpu)
        )
        found[mode] = problem or wanted
    return found


def _find_budget_problem(config: RunConfig, on_gpu: bool) -> str:
    """What is wrong where workers cannot stay within their budget."""
    if config.placement.memory_mb is None:
        return ""
    try:
        check_worker_memory(config, on_gpu=on_gpu)
    except ConfigError as error:
        return str(error)
    return ""


def _find_serving_problem(config: RunConfig, on_gpu: bool) -> str:
    """What is wrong where vLLM cannot take up new weights of the model as it is placed."""
    path, ranks, there = config.model.path, config.generator.tensor_parallel, config.placement
    if there.is_hybrid:
        architectures = read_model_config(path).architectures or ()
        if why := explain_unshareable_process(architectures, mode=there.mode, on_gpu=on_gpu):
            return why
    return explain_unloadable_split(ranks, has_experts=has_experts(path), on_gpu=on_gpu)


def _find_cache_problem(config: RunConfig, demands: Sequence[ResourceDemand]) -> str:
    """What is wrong where a generator would take all of a GPU that others have a part of."""
    if config.generator.kv_cache_mb is not None or not config.placement.shared_pools:
        return ""
    placement = assign_slots(config)
    on_gpu = {demand.calls[0].role for demand in demands if demand.calls and demand.gpus}
    beside = {
        role
        for slot in placement.find_slots([GENERATE_CALL.role])
        for role in placement.list_roles(slot)
    }
    others = sorted(beside & on_gpu - {GENERATE_CALL.role})
    if not others:
        return ""
    return (
        f"generator.kv_cache_mb=null: must be set where a generator shares a GPU, here with"
        f" {', '.join(others)}, else the KV cache takes what there is"
    )


def list_resource_demands(
    config: RunConfig, prepared: PreparedRun, on_gpu: bool
) -> list[ResourceDemand]:
    """The actors a run needs, in flow order; shards and coordinator take no slot.

    Where roles share devices, the slots are asked for by themselves, and the actors have a part of
    one each.
    """
    shares = bool(config.placement.shared_pools)
    found = []
    for role, (key, count) in count_actors(config).items():
        # It, or a part of it, lives in the process of a rank.
        is_guest = role == GENERATE_CALL.role and config.placement.is_hybrid
        is_split = role == GENERATE_CALL.role and not is_guest
        devices = config.generator.tensor_parallel if is_split else 1
        weights = prepared.model_bytes
        if role in (REWARD_CALL.role, COST_CALL.role):
            weights = prepared.reward_model_bytes.get(role, 0)
        found.append(
            ResourceDemand(
                prepared.dataflow.calls_by_role[role],
                role="trainer" if role == POLICY else role,
                setting=key,
                count=count,
                cpus=devices,
                gpus=devices * (on_gpu and weights > 0),
                memory_gib=0.0
                if is_guest
                else devices * PROCESS_GIB + (not on_gpu) * weights / GIB,
                is_in_shared_slot=shares,
            )
        )
    return [*_iter_slot_demands(config, found), *found] if shares else found


def _iter_slot_demands(
    config: RunConfig, demands: Sequence[ResourceDemand]
) -> Iterator[ResourceDemand]:
    """Slots that roles share; those where somebody has a model on a GPU are GPUs."""
    placement, key = assign_slots(config), f"placement.mode={config.placement.mode}"
    on_gpus = len(placement.find_slots({d.calls[0].role for d in demands if d.gpus}))
    for count, gpus in ((on_gpus, 1), (placement.num_slots - on_gpus, 0)):
        if count:
            yield ResourceDemand((), SHARED_SLOTS, key, count, gpus=gpus)


def check_worker_memory(config: RunConfig, *, on_gpu: bool) -> WorkerMemory | None:
    """What a worker of a colocated run holds; None of other runs.

    Raises ConfigError with the arithmetic if it cannot stay within placement.memory_mb.
    """
    budget_mb, generator = config.placement.memory_mb, config.generator
    if not config.placement.is_hybrid:
        return None
    held = estimate_worker_memory(
        config.model.path,
        config.trainer,
        generator,
        micro_batch_tokens=config.pipeline.micro_batch_tokens,
        on_gpu=on_gpu,
    )
    least = held.fit_budget(budget_mb)
    if least.releases_kv and config.weights.kv == "keep":
        raise ConfigError(
            "weights.kv=keep: the KV cache is released while a worker trains, which stays within"
            f" placement.memory_mb={budget_mb} only so: {held.format_sum('train')} MB"
        )
    return least


def compute_max_group_bytes(config: RunConfig, prepared: PreparedRun) -> int:
    """Most bytes the columns of one group can take in the queue."""
    return max_group_bytes(
        prepared.dataflow,
        prepared.component_columns,
        rollouts=config.algorithm.group_size,
        tokens=prepared.max_length,
    )


def compute_shard_bytes(
    config: RunConfig, prepared: PreparedRun, *, node_stores: Sequence[float]
) -> int:
    """What one shard may hold of the object store of its node, whichever that is.

    `node_stores` are their sizes in bytes. Raises ConfigError if a step could need more.
    """
    per_node, smallest = -(-config.queue.shards // len(node_stores)), min(node_stores)
    share = int(config.queue.store_share * smallest / per_node)
    check_shard_bytes(
        share,
        group_bytes=compute_max_group_bytes(config, prepared),
        groups_per_step=config.pipeline.groups_per_step,
        place=f"queue.store_share={config.queue.store_share} of an object store of"
        f" {smallest / 2**20:.0f} MB over {per_node} of queue.shards={config.queue.shards}",
    )
    return share


def _note_frozen_experts(path: str, trainer: TrainerConfig, section: str) -> list[str]:
    """Say that routed experts get no adapters: their weights are no linear layers."""
    if not trainer.lora_rank:
        return []
    shapes = read_stored_shapes(Path(path), "model.path")
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    frozen = sum(
        size
        for name, size in sizes.items()
        if ".experts." in name or len(shapes[name]) == NUM_EXPERT_AXES
    )
    if not frozen:
        return []
    return [
        f"{section}.lora_rank={trainer.lora_rank}: routed experts,"
        f" {frozen / sum(sizes.values()):.0%} of the model's weights, get no adapters and stay as"
        " they are"
    ]


def _check_stop_tokens(config: RunConfig) -> None:
    vocab_size = load_vocab_size(config.model.path)
    for token_id in config.generator.stop_token_ids:
        if token_id >= vocab_size:
            raise ConfigError(
                f"generator.stop_token_ids: {token_id}: the model knows ids below {vocab_size}"
            )


def _check_micro_batch(config: RunConfig, max_length: int) -> None:
    budget, new = config.pipeline.micro_batch_tokens, config.generator.max_new_tokens
    if budget < max_length:
        raise ConfigError(
            f"pipeline.micro_batch_tokens={budget}: must hold one rollout, {max_length} tokens"
            f" = longest prompt {max_length - new} + generator.max_new_tokens {new}"
        )


def _collect_notes(
    config: RunConfig, train: TrainingFiles, evaluation: LoadedPrompts
) -> tuple[str, ...]:
    """What the user should know before the run starts."""
    notes = [note for opened in train.files for note in opened.notes]
    notes += [note for loaded in evaluation.files for note in loaded.notes]
    if config.critic.warmup_alone >= config.run.steps:
        notes.append(
            f"critic.warmup_alone={config.critic.warmup_alone}: the policy is trained in none of"
            f" run.steps={config.run.steps}"
        )
    groups = config.run.steps * config.pipeline.groups_per_step
    for part in train.stream_files:
        of = f"{part.name}, {part.fraction:.0%} of the stream: " if len(train.files) > 1 else ""
        count, size = round(groups * part.fraction), len(part.indices)
        notes.append(f"{of}{size} prompts; {count} groups are {count / size:.2f} epochs")
    return tuple(notes)
