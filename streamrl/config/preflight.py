"""Preflight: every check of a run that starts no process and writes no file.

`prepare_run` returns the loaded prompts, with which the run then starts.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from streamrl.buffer.staleness_credits import check_shard_bytes
from streamrl.config.device_memory import GIB, estimate_role_memory, find_gpu_shortage
from streamrl.config.role_counts import (
    assign_slots,
    count_actors,
    count_ranks_per_replica,
    with_placement_mode,
)
from streamrl.config.run_config import RunConfig, find_colocation_conflict
from streamrl.data.chat_template import load_tokenizer
from streamrl.data.pass_rates import PassRates
from streamrl.data.pretrain_texts import load_texts
from streamrl.data.prompt_file import (
    LazyTokenizer,
    LoadedFile,
    PromptInspector,
    TrainingFiles,
    load_prompts,
    open_training_files,
)
from streamrl.data.prompt_stream import PromptStream
from streamrl.data.replays import ReplayStore
from streamrl.dataflow import (
    EMA_REFERENCE,
    GENERATE_CALL,
    POLICY,
    REF_LOGPROBS,
    REWARD_ROLES,
    CallKind,
    ModelCall,
)
from streamrl.distributed.devices import find_smallest_gpu_bytes, has_local_gpu
from streamrl.engines.memory.worker_memory import WorkerMemory
from streamrl.engines.models.tensor_parallel_support import (
    MAX_EXPERTS,
    check_generator_split,
    check_trainer_split,
    get_expert_sizes,
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
    read_vocab_size,
)
from streamrl.files.typed_settings import check_conflicts
from streamrl.messages import Prompt
from streamrl.placement.resource_demand import SHARED_SLOTS, PlacementOption, ResourceDemand
from streamrl.rewards.group_filter import build_group_filter
from streamrl.rewards.interface.reward import RewardContext
from streamrl.rewards.registry import build_rewards
from streamrl.rewards.reward_set import SCORE_SPECS
from streamrl.run_dir.checkpoint import check_model_dir
from streamrl.weights.config import COLLECTIVE

NUM_EXPERT_AXES = 3
"""Number of axes of a parameter that stacks the weights of all experts of a layer."""
PROCESS_GIB = 0.4
"""Memory of an actor after its imports and before any model, GiB; measured."""


@dataclass(frozen=True)
class PreparedRun:
    """Loaded inputs of a run that passed all checks and may start.

    eval_prompts: evaluation prompts by file name. max_length: maximum tokens of prompt plus
    completion. model_bytes: size of the weight files of each role's models; 0 for rewards and costs
    without a model. notes: messages to log at the start.
    """

    prompts: PromptStream
    eval_prompts: Mapping[str, Sequence[Prompt]]
    max_length: int
    model_bytes: Mapping[str, int]
    notes: tuple[str, ...]


def prepare_run(
    config: RunConfig, on_checked: Callable[[int], None] = lambda count: None
) -> PreparedRun:
    """Load and check everything the run reads. Raises a one-line ConfigError; writes no file.

    on_checked: receives the number of prompts of each batch that is checked.
    """
    os.environ.update(make_trusted_env(*config.trusted_models))
    context = RewardContext(config.scorer, config.sandbox)
    score_sets = {
        role: build_rewards(config.get_rewards(role), context, score_spec=score_spec)
        for role, score_spec in SCORE_SPECS.items()
        if role in config.dataflow.calls_by_role
    }
    build_group_filter(config.filter)
    _check_model_files(config)
    notes = [asyncio.run(reward_set.run_preflight()) for reward_set in score_sets.values()]
    first_prompts: dict[str, Prompt] = {}

    def inspect(prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            first_prompts.setdefault(prompt.environment, prompt)
        for reward_set in score_sets.values():
            reward_set.check_prompts(prompts)
        on_checked(len(prompts))

    train, evaluation = open_prompt_files(config, inspect)
    eval_prompts = {loaded.file.name: loaded.prompts for loaded in evaluation}
    for prompts in eval_prompts.values():
        inspect(prompts)
    if config.environment.is_enabled and not config.reads_rows:
        # Here: most runs have no environment, and need not wait for its imports.
        from streamrl.environments.episodes.check_environment import check_environments

        firsts = [*first_prompts.values()]
        for prompts in eval_prompts.values():
            firsts += {prompt.environment: prompt for prompt in reversed(prompts)}.values()
        notes.append(
            check_environments(
                config.environment,
                config.data,
                firsts,
                model_path=config.model.path,
                state_reader=config.algorithm.name * config.reads_states,
            )
        )
    if config.data.pretrain:
        load_texts(config.data.pretrain)
    lengths = (len(prompt.token_ids) for prompts in eval_prompts.values() for prompt in prompts)
    max_length = max(train.max_prompt_tokens, *lengths, 0) + config.max_completion_tokens
    _check_micro_batch(config, max_length)
    notes += [_check_trained_model(config, role) for role in config.dataflow.trained_roles]
    notes.append(_check_reference(config, max_length))
    _check_scoring_splits(config)
    _check_router_replay(config)
    if not config.reads_rows:
        check_generator_split(config.model.path, config.generator.tensor_parallel)
    if not config.placement.address:  # The devices of a cluster are unknown until Ray is connected.
        check_worker_memory(config, on_gpu=has_local_gpu())
    replay = config.data.read_replay()
    return PreparedRun(
        prompts=PromptStream(
            train,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            curriculum=config.data.curriculum,
            pass_rates=PassRates() if config.data.sampling == "difficulty" else None,
            replays=None
            if replay is None
            else ReplayStore(replay, seed=config.run.seed, max_lead=config.pipeline.max_staleness),
        ),
        eval_prompts=eval_prompts,
        max_length=max_length,
        model_bytes={
            **{
                role: _measure_model(config, calls[0])
                for role, calls in config.dataflow.calls_by_role.items()
            },
            **dict.fromkeys(SCORE_SPECS, 0),
            **{role: reward_set.model_bytes for role, reward_set in score_sets.items()},
        },
        notes=(*chain.from_iterable(notes), *_collect_notes(config, train, evaluation)),
    )


def _measure_model(config: RunConfig, call: ModelCall) -> int:
    """Return the bytes of the weight files from which a call's model starts."""
    path = Path(config.get_model_path(call.model_role))
    return sum(file.stat().st_size for file in list_weight_files(path))


def open_prompt_files(
    config: RunConfig, inspect: PromptInspector = lambda prompts: None
) -> tuple[TrainingFiles, list[LoadedFile]]:
    """Open the training files and load the evaluation files; `inspect` receives training prompts.

    Raises ConfigError if the model or a file cannot be read.
    """
    data, tokenizer = config.data, LazyTokenizer(config.model.path)
    limits = config.make_prompt_limits(config.model.path, most_tokens=config.model.max_length)
    left_tokens: int | None = config.pipeline.micro_batch_tokens - config.max_completion_tokens
    if config.reads_rows:
        # The sample of a large file may lack the longest completion.
        most = config.pipeline.micro_batch_tokens // config.max_rollouts_per_episode
        limits, left_tokens = replace(limits, max_tokens=min(limits.max_tokens, most)), None
    # Loads the renderer of episodes, which most runs do not need.
    from streamrl.environments.rendering.target_renderer import TargetRenderer

    train = open_training_files(
        [replace(file, gives=config.algorithm.spec.trains_on) for file in data.train_files],
        tokenizer,
        limits,
        max_sampled_tokens=left_tokens if data.max_prompt_tokens is None else None,
        inspect=inspect,
        make_renderer=TargetRenderer,
    )
    # Without a generator nobody answers evaluation prompts.
    files = () if config.reads_rows else data.eval_files
    evaluation = load_prompts(files, tokenizer(), limits, max_prompts=config.evaluation.max_rows)
    return train, evaluation


def _check_model_files(config: RunConfig) -> None:
    """Check the files of the models, and that the policy's vocabulary has the stop tokens.

    Raises ConfigError, also for a model of a checkpoint that has changed since.
    """
    for key in ("model", "critic", "reference"):
        if path := vars(vars(config)[key])["path"]:
            check_model_dir(Path(path), f"{key}.path=")
    read_model_length(config.model.path, limit=config.model.max_length)
    vocab_size = read_vocab_size(config.model.path)
    exceeds = any(token_id >= vocab_size for token_id in config.generator.stop_token_ids)
    rule = f"the vocabulary has ids below {vocab_size}"
    is_wide = config.generator.num_mask_words > vocab_size
    check_conflicts(
        config,
        [
            (exceeds, "generator.stop_token_ids", rule),
            (is_wide, "generator.sampling_mask", f"top_k: {rule}"),
        ],
    )


def _check_trained_model(config: RunConfig, role: str) -> list[str]:
    """Check that a role's model can be trained as configured; return notes on it.

    Raises ConfigError.
    """
    is_policy = role == POLICY
    key = "model.path" if is_policy or not config.critic.path else "critic.path"
    path, trainer = config.get_model_path(role), config.get_trainer_config(role)
    # The modules load model classes, which no other check needs.
    from streamrl.engines.models.supported_models import check_trained_model

    is_served = is_policy and not config.reads_rows
    notes = check_trained_model(path, trainer, key=key, is_served=is_served)
    return [*notes, *_note_frozen_experts(path, trainer)]


def _check_reference(config: RunConfig, max_length: int) -> list[str]:
    """Raise ConfigError unless the reference can score the policy's tokens, `max_length` in a row.

    A vocabulary may be padded further than the policy's, but not less: the policy can sample any id
    of its own. An algorithm that learns from the reference alone needs one that differs. Returns a
    note if the reference's texts end with another token.
    """
    path, base = config.reference.path, config.model.path
    is_base = not path and not config.reference.every
    rule = (
        f"must be set: {config.algorithm.name} learns from the reference, which otherwise is the"
        " initial policy"
    )
    needs_other = REF_LOGPROBS in config.algorithm.spec.columns
    check_conflicts(config, [(is_base and needs_other, "reference.path", rule)])
    if not path:
        return []
    from streamrl.engines.models.supported_models import check_model_support

    check_model_support(path, key="reference.path", is_served=False)
    tokenizers = [load_tokenizer(directory) for directory in (base, path)]
    own, other = (tokenizer.get_vocab() for tokenizer in tokenizers)
    token = min((token for token, _ in own.items() ^ other.items()), default="")
    length, width, least = read_model_length(path, limit=None), *map(read_vocab_size, (path, base))
    rules = {
        f"must have the tokenizer of model.path={base}: the id of {token!r} is {other.get(token)},"
        f" not {own.get(token)}": own != other,
        f"takes {length} tokens, fewer than a rollout's {max_length}": length < max_length,
        f"has {width} token ids, and the policy samples from {least}": width < least,
    }
    check_conflicts(config, [(holds, "reference.path", rule) for rule, holds in rules.items()])
    ends = [tokenizer.eos_token for tokenizer in tokenizers]
    return [
        f"reference.path={path}: its texts end with {ends[1]!r}, and the policy's with {ends[0]!r},"
        " which it scores as it would score any token there"
    ] * (ends[0] != ends[1])


def _check_router_replay(config: RunConfig) -> None:
    """Raise ConfigError if the routers' choices cannot be replayed, or not returned."""
    if config.algorithm_settings.router_replay == "off":
        return
    sizes = get_expert_sizes(read_model_config(config.model.path))
    is_split_on_cpu = config.generator.tensor_parallel > 1 and not has_local_gpu()
    rules = {
        f"{config.model.path} is no mixture of experts; set off": not sizes.num_experts,
        f"stores experts up to {MAX_EXPERTS}, not {sizes.num_experts}": sizes.num_experts
        > MAX_EXPERTS,
        "on CPUs only a generator of one process tells its experts; set"
        " generator.tensor_parallel=1": config.returns_experts and is_split_on_cpu,
    }
    check_conflicts(
        config, [(holds, "algorithm.router_replay", rule) for rule, holds in rules.items()]
    )


def _check_scoring_splits(config: RunConfig) -> None:
    """Raise ConfigError if ranks cannot share the model of a reference or shadow critic."""
    for role, (call, *_) in config.dataflow.calls_by_role.items():
        # A reward model checks its own ranks.
        if role not in REWARD_ROLES and count_ranks_per_replica(config, role) > 1:
            path = config.get_model_path(call.model_role)
            check_trainer_split(path, config.get_ranks_config(call))


def list_placement_options(
    config: RunConfig, prepared: PreparedRun, on_gpu: bool
) -> dict[str, PlacementOption]:
    """Return the resources that each allowed placement mode demands, best mode first.

    A mode that cannot run has the reason in place of its demands. on_gpu: the cluster has GPUs.
    """
    modes = [config.placement.mode]
    if modes == ["auto"]:
        modes = ["disaggregated", "colocated"]
    options: dict[str, PlacementOption] = {}
    for mode in modes:
        if mode == "colocated" and (conflict := find_colocation_conflict(config)):
            options[mode] = conflict
            continue
        placed_config = with_placement_mode(config, mode)
        demands = list_resource_demands(placed_config, prepared, on_gpu)
        problem = (
            _find_cache_problem(placed_config, demands)
            or _find_budget_problem(placed_config, on_gpu)
            or _find_memory_problem(placed_config, prepared, on_gpu)
            or _find_serving_problem(placed_config, on_gpu)
        )
        options[mode] = problem or demands
    return options


def _find_budget_problem(config: RunConfig, on_gpu: bool) -> str:
    """Return why a process of a colocated run exceeds placement.memory_mb, or ""."""
    if config.placement.memory_mb is None:
        return ""
    try:
        check_worker_memory(config, on_gpu=on_gpu)
    except ConfigError as error:
        return str(error)
    return ""


def _find_memory_problem(config: RunConfig, prepared: PreparedRun, on_gpu: bool) -> str:
    """Return why models do not fit the GPUs, or ""; the driver's GPUs stand for the cluster's.

    A driver without GPUs leaves the check to the trainers.
    """
    gpu_bytes = find_smallest_gpu_bytes() if on_gpu else None
    return find_gpu_shortage(config, prepared.model_bytes, gpu_bytes) if gpu_bytes else ""


def _find_serving_problem(config: RunConfig, on_gpu: bool) -> str:
    """Return why vLLM cannot load new weights under the config's placement, or ""."""
    placement = config.placement
    if placement.is_hybrid:
        architectures = read_model_config(config.model.path).architectures or ()
        return explain_unshareable_process(architectures, mode=placement.mode, on_gpu=on_gpu)
    return ""


def _find_cache_problem(config: RunConfig, demands: Sequence[ResourceDemand]) -> str:
    """Return the error if a generator's KV cache would take all memory of a shared GPU, or ""."""
    if config.generator.kv_cache_mb is not None or not config.placement.shared_pools:
        return ""
    placement = assign_slots(config)
    on_gpu = {demand.calls[0].role for demand in demands if demand.calls and demand.gpus}
    neighbors = {
        role
        for slot in placement.find_slots([GENERATE_CALL.role])
        for role in placement.list_roles(slot)
    }
    others = sorted(neighbors & on_gpu - {GENERATE_CALL.role})
    if not others:
        return ""
    return (
        f"generator.kv_cache_mb=null: must be set where a generator shares a GPU, here with"
        f" {', '.join(others)}; otherwise the KV cache takes all free memory"
    )


def list_resource_demands(
    config: RunConfig, prepared: PreparedRun, on_gpu: bool
) -> list[ResourceDemand]:
    """Return the CPUs, GPUs and memory that a run's actors demand from Ray, in dataflow order.

    Queue shards and the coordinator take no slot and are left out. With shared pools the slots are
    demanded separately, and each actor uses part of a slot.
    """
    is_shared = bool(config.placement.shared_pools)
    demands = []
    for role, (key, count) in count_actors(config).items():
        # A generator of a colocated run lives in a trainer rank's process.
        is_guest = role == GENERATE_CALL.role and config.placement.is_hybrid
        is_split = role == GENERATE_CALL.role and not is_guest
        devices = config.generator.tensor_parallel if is_split else 1
        weights = prepared.model_bytes[role]
        is_scorer = role not in (*config.dataflow.trained_roles, GENERATE_CALL.role)
        calls = config.dataflow.calls_by_role[role]
        # Actors share the copy of a model that rests in host memory.
        rests = config.scorer.offload and is_scorer and on_gpu
        copies = 1 / count if rests else (not on_gpu) / _count_shards(config, calls[0])
        copies += _receives_on_host(config, calls)
        memory_gib = devices * PROCESS_GIB + copies * weights / GIB
        # Shards of FSDP2 are in memory of each process.
        is_sharded = role not in REWARD_ROLES and config.get_ranks_config(calls[0]).fsdp_size > 1
        if not is_scorer and role != GENERATE_CALL.role:
            memory_gib += _count_host_state_bytes(config, role, on_gpu=on_gpu) / GIB
        demands.append(
            ResourceDemand(
                calls,
                role="trainer" if role == POLICY else role,
                setting=key,
                count=count,
                cpus=devices,
                gpus=devices * (on_gpu and weights > 0),
                memory_gib=0.0 if is_guest else memory_gib,
                resting_bytes=weights if rests and not is_sharded else 0,
                is_in_shared_slot=is_shared,
            )
        )
    return [*_iter_slot_demands(config, demands), *demands] if is_shared else demands


def _count_shards(config: RunConfig, call: ModelCall) -> int:
    """Return over how many ranks the model of a call is sharded."""
    if call.kind is CallKind.GENERATE or call.role in REWARD_ROLES:
        return count_ranks_per_replica(config, call.role)
    ranks = config.get_ranks_config(call)
    return ranks.world_size if ranks.has_sharded_params else 1


def _count_host_state_bytes(config: RunConfig, role: str, *, on_gpu: bool) -> int:
    """Return the bytes of a trainer rank's optimizer and gradients that are in host memory."""
    if on_gpu and not config.get_trainer_config(role).offload_optimizer:
        return 0
    memory = estimate_role_memory(config, role, on_gpu=False)
    return memory.optimizer + memory.gradients * (not on_gpu)


def _receives_on_host(config: RunConfig, calls: Sequence[ModelCall]) -> bool:
    """Return whether an actor receives whole versions of a model into host memory of its own.

    So it does by the collective transport. False where `weights.transport` lets the cluster decide.
    """
    if config.weights.transport != COLLECTIVE:
        return False
    roles = {call.followed_role for call in calls if call.followed_role}
    trained = {POLICY if role == EMA_REFERENCE else role for role in roles}
    return any(not config.get_trainer_config(role).lora_rank for role in trained)


def _iter_slot_demands(
    config: RunConfig, demands: Sequence[ResourceDemand]
) -> Iterator[ResourceDemand]:
    """Yield the resources of the placement slots that roles share.

    A slot demands a GPU if a role in it has a model on a GPU.
    """
    placement, key = assign_slots(config), f"placement.mode={config.placement.mode}"
    on_gpus = len(placement.find_slots({d.calls[0].role for d in demands if d.gpus}))
    for count, gpus in ((on_gpus, 1), (placement.num_slots - on_gpus, 0)):
        if count:
            yield ResourceDemand((), SHARED_SLOTS, key, count, gpus=gpus)


def check_worker_memory(config: RunConfig, *, on_gpu: bool) -> WorkerMemory | None:
    """Return the memory of a process that trains and generates in a colocated run.

    None for other placement modes. Raises ConfigError with the arithmetic if the memory exceeds
    placement.memory_mb.
    """
    budget_mb = config.placement.memory_mb
    if not config.placement.is_hybrid:
        return None
    memory = estimate_role_memory(config, POLICY, on_gpu=on_gpu)
    fitted = memory.fit_budget(budget_mb)
    if fitted.releases_kv and config.weights.kv == "keep":
        raise ConfigError(
            "weights.kv=keep: a worker fits placement.memory_mb"
            f"={budget_mb} only if it frees the KV cache while training:"
            f" {memory.format_sum('train')} MB"
        )
    return fitted


def compute_shard_bytes(
    config: RunConfig, prepared: PreparedRun, *, node_stores: Sequence[float]
) -> int:
    """Return the object-store bytes that a queue shard may use, whichever node it runs on.

    node_stores: object store size of each node, bytes. Raises ConfigError if a training step may
    need more.
    """
    replay = config.data.read_replay()
    per_node, smallest = -(-config.queue.shards // len(node_stores)), min(node_stores)
    shard_bytes = int(config.queue.store_share * smallest / per_node)
    check_shard_bytes(
        shard_bytes,
        group_bytes=config.bound_group_bytes(prepared.max_length),
        groups={
            "pipeline.groups_per_step": config.pipeline.groups_per_step,
            # As many again may have left the store while a replay of them waits for the shard.
            "twice data.replay.size": 2 * replay.size if replay else 0,
        },
        location=f"{config.queue.store_share:.0%} of an object store of"
        f" {smallest / 2**20:.0f} MB over {per_node} of queue.shards={config.queue.shards}",
        remedy="--object-store-memory of `ray start`"
        if config.placement.address
        else "placement.object_store_mb",
    )
    return shard_bytes


def _note_frozen_experts(path: str, trainer: TrainerConfig) -> list[str]:
    """Return a list with a note if LoRA leaves routed experts frozen, else an empty list.

    LoRA adapts Linear modules; the weights of routed experts belong to none. path: model directory.
    """
    shapes = read_stored_shapes(Path(path), "model.path") if trainer.lora_rank else {}
    if not any(
        ".experts." in name or len(shape) == NUM_EXPERT_AXES for name, shape in shapes.items()
    ):
        return []
    setting = f"{trainer.section}.lora_rank={trainer.lora_rank}"
    return [f"{setting}: routed experts get no adapters and stay frozen"]


def _check_micro_batch(config: RunConfig, max_length: int) -> None:
    """Raise ConfigError if an episode, with samples of `max_length` tokens, exceeds a micro-batch.

    The samples of an episode are in the same micro-batch.
    """
    samples = config.max_rollouts_per_episode
    max_new_tokens = config.max_completion_tokens
    exceeds = config.pipeline.micro_batch_tokens < samples * max_length
    count = "one rollout" if samples == 1 else f"environment.max_samples={samples} samples, each"
    rule = f"must fit {count} of {max_length} tokens"
    if max_new_tokens:
        rule += (
            f" = longest prompt {max_length - max_new_tokens}"
            f" + {config.completion_limit_key} {max_new_tokens}"
        )
    check_conflicts(config, [(exceeds, "pipeline.micro_batch_tokens", rule)])


def _collect_notes(
    config: RunConfig, train: TrainingFiles, evaluation: Sequence[LoadedFile]
) -> tuple[str, ...]:
    """Return notes for the log: unused rows, a frozen policy, and epochs per file of the run."""
    notes = [note for opened in train.files for note in opened.notes]
    if config.reads_rows and (config.rewards or config.data.eval or config.environment.is_enabled):
        notes.append(
            f"{config.algorithm.name} trains on rows of the data: rewards, environment and"
            " data.eval have no effect"
        )
    if config.environment.isolate and not config.reads_rows:
        notes.append(
            f"environment.isolate: a generator has up to {config.max_open_rollouts} processes of"
            " environments, one per open episode, from 26 MiB each; environment.open_episodes"
            " bounds them"
        )
    notes += [note for loaded in evaluation for note in loaded.notes]
    if config.critic.warmup_alone >= config.run.steps:
        notes.append(
            f"critic.warmup_alone={config.critic.warmup_alone}: the policy is frozen in all"
            f" run.steps={config.run.steps}"
        )
    groups = config.run.steps * config.pipeline.groups_per_step
    for file, share in zip(train.files, train.shares, strict=True):
        path = file.prompt_file.file.path
        name = f"{path}, {share:.0%} of the stream: " if len(train.files) > 1 else ""
        count, size = round(groups * share), len(file.row_indices)
        notes.append(f"{name}{size} prompts; {count} groups are {count / size:.2f} epochs")
    return tuple(notes)
