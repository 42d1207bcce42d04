"""Conversion of a run's config to a planner problem: model shapes, calls, workload."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from streamrl.config.preflight import open_prompt_files
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import (
    COST_VALUE_CALL,
    CRITIC_ROLES,
    POLICY,
    REFERENCE_CALL,
    REWARD_ROLES,
    VALUE_CALL,
    CallKind,
)
from streamrl.engines.models.model_shapes import ModelShape, add_adapter_params, load_model_shape
from streamrl.errors import ConfigError, extend_errors
from streamrl.placement.clusters import Cluster
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.problem.problem import PlacementProblem, RunMemory, RunOptions
from streamrl.planner.problem.workload import (
    LengthDistribution,
    Workload,
    make_fixed_lengths,
)
from streamrl.rewards.kinds.model import ModelOptions


@dataclass(frozen=True)
class PlannerRequest:
    """Inputs of the planner that a run's config lacks.

    prompt_tokens: mean prompt length. models: model names by role, overriding the config's.
    lengths: sampled tokens of a rollout; None: generator.max_new_tokens for all. filtered_fraction:
    share of sampled groups that dynamic sampling rejects. max_prompt_tokens: longest prompt; None:
    the mean.
    """

    prompt_tokens: float
    models: Mapping[str, str] = field(default_factory=dict)
    lengths: LengthDistribution | None = None
    filtered_fraction: float = 0.0
    max_prompt_tokens: int | None = None


def check_generates(config: RunConfig) -> None:
    """Raise ConfigError for a run that trains on rows of the data: nothing waits for another."""
    if config.reads_rows:
        raise ConfigError(
            f"algorithm.name={config.algorithm.name}: the run has only a trainer: there is no"
            " placement to plan and no bottleneck to find"
        )


def build_planner_problem(
    config: RunConfig, cluster: Cluster, request: PlannerRequest
) -> PlacementProblem:
    """Build the planner problem of a run. Raises ConfigError for a model of unknown size."""
    algorithm, settings, generator = config.algorithm, config.algorithm_settings, config.generator
    check_generates(config)
    longest_prompt = request.max_prompt_tokens or max(1, round(request.prompt_tokens))
    workload = Workload(
        config.pipeline.groups_per_step,
        algorithm.group_size,
        request.prompt_tokens,
        request.lengths or make_fixed_lengths(config.max_completion_tokens),
        settings.epochs,
        settings.mini_batches,
        # Ranks that share a micro-batch are planned as if each had a part of its own.
        config.pipeline.micro_batch_tokens // config.trainer.sequence_parallel,
        settings.scope == "step" or settings.num_updates > 1,
        request.filtered_fraction,
        (longest_prompt, config.max_completion_tokens),
    )
    hosts, config = config.hosts, separate_hosted_roles(config)
    return PlacementProblem(
        config.dataflow,
        build_model_shapes(config, request.models),
        workload,
        cluster,
        _build_run_options(config),
        _compute_score_tokens(config),
        (generator.resolve_kv_cache_mb(on_gpu=not cluster.is_cpu) or 0) << 20,
        RunMemory(
            {role: config.get_trainer_config(role) for role in config.dataflow.trained_roles},
            generator,
            scores_from_host=config.scorer.offload,
            transport=config.weights.transport,
        ),
        hosts,
    )


def separate_hosted_roles(config: RunConfig) -> RunConfig:
    """Return the config of a run in which no trained model's ranks compute scores.

    Its dataflow has a role for values and for a reference below adapters, which a placement may
    put elsewhere.
    """
    stages = {call.stage for call in config.dataflow.calls}
    critic, reference = config.critic, config.reference
    if stages & {VALUE_CALL.stage, COST_VALUE_CALL.stage}:
        critic = replace(critic, replicas=critic.replicas or 1)
    if REFERENCE_CALL.stage in stages:
        reference = replace(reference, replicas=reference.replicas or 1)
    return replace(config, critic=critic, reference=reference)


def _compute_score_tokens(config: RunConfig) -> dict[str, int]:
    """Return the maximum tokens in a forward pass of each scoring role.

    Reward models have a setting of their own, batch_tokens; others use pipeline.micro_batch_tokens.
    """
    tokens_by_role = {}
    for call in config.dataflow.select_calls(CallKind.SCORE):
        tokens = config.pipeline.micro_batch_tokens
        if rewards := config.list_model_rewards(call.role):
            tokens = rewards[0].options.get("batch_tokens", ModelOptions.batch_tokens)
        elif call.role not in REWARD_ROLES:
            # Ranks that share a micro-batch are planned as if each had a part of its own.
            tokens //= config.get_ranks_config(call).sequence_parallel
        tokens_by_role[call.role] = int(tokens)
    return tokens_by_role


def build_model_shapes(config: RunConfig, named: Mapping[str, str]) -> dict[str, ModelShape]:
    """Return the shape (layers, widths, ...) of each role's model.

    named: model names or directories by role; other roles use the directories in the config.
    Rewards and costs have a shape only if named or computed with a model. Raises ConfigError for an
    unknown role or model.
    """
    roles = {call.model_role for call in config.dataflow.calls}
    for role in named:
        if role not in roles:
            raise ConfigError(
                f"--model {role}={named[role]}: the run has {', '.join(sorted(roles))}"
            )
    policy = _load_model_shape(named.get(POLICY, config.model.path), POLICY)
    shapes = {POLICY: _with_trained_adapters(config, POLICY, policy)}
    for role in sorted(roles - {POLICY}):
        if role in named:
            shape = _load_model_shape(named[role], role)
        elif role in REWARD_ROLES:
            rewards = config.list_model_rewards(role)
            if not rewards:
                continue
            shape = _load_model_shape(str(rewards[0].options["path"]), role)
        elif (path := config.get_model_path(role)) != config.model.path:
            shape = _load_model_shape(path, role)
        else:
            # An EMA reference receives what the policy trains, adapters included.
            shape = shapes[POLICY]
        shape = shape.to_critic() if role in (*CRITIC_ROLES, *REWARD_ROLES) else shape
        shapes[role] = _with_trained_adapters(config, role, shape)
    return shapes


def _with_trained_adapters(config: RunConfig, role: str, shape: ModelShape) -> ModelShape:
    """Add LoRA adapters to a model's shape if the run trains adapters for this role."""
    if role not in config.dataflow.trained_roles:
        return shape
    return add_adapter_params(shape, config.get_trainer_config(role).lora_rank)


def _load_model_shape(model: str, role: str) -> ModelShape:
    with extend_errors(after=f"; choose another with --model {role}=NAME"):
        return load_model_shape(model)


def measure_prompt_tokens(config: RunConfig) -> tuple[float, int]:
    """Return the mean prompt length of data.train, and the maximum of data.train and data.eval.

    Lengths in tokens, counted with the run's tokenizer and prompt limit. Raises ConfigError if the
    model or a file cannot be read.
    """
    with extend_errors(after="; give the prompt length with --prompt-tokens N"):
        opened, evaluation = open_prompt_files(config)
    longest = max(
        opened.max_prompt_tokens,
        *(len(prompt.token_ids) for loaded in evaluation for prompt in loaded.prompts),
        0,
    )
    return opened.mean_prompt_tokens, longest


def build_run_constants(config: RunConfig, constants: CostConstants) -> CostConstants:
    """Return cost constants with the settings of a run."""
    return replace(constants, max_running=config.generator.max_concurrent_rollouts)


def _build_run_options(config: RunConfig) -> RunOptions:
    pipeline = config.pipeline
    return RunOptions(
        depth=pipeline.depth,
        on_stale=pipeline.on_stale,
        slice_s=config.placement.slice_s,
        publish_every=config.weights.publish_every,
        # A fixed reference has no updates; 1 is neutral.
        reference_every=config.reference.every or 1,
        oversample=config.filter.oversample_factor,
    )
