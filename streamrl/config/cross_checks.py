"""Checks across config sections, for settings that are valid alone and contradict each other.

Each check raises ConfigError with the setting, its value and the rule.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from streamrl.algorithms import list_required_columns
from streamrl.algorithms.table import ALGORITHMS
from streamrl.buffer.staleness_credits import MAX_FACTOR as MOST_OVERSAMPLED
from streamrl.dataflow import (
    COST_CALL,
    CRITIC,
    CRITIC_BY_COLUMN,
    GENERATE_CALL,
    GREEDY_CALL,
    POLICY,
    REWARD_CALL,
)
from streamrl.engines.trainer_config import CriticConfig
from streamrl.errors import AlgorithmError, ConfigError
from streamrl.files.typed_settings import Conflict, check_conflicts
from streamrl.rewards.kinds.rules import ENVIRONMENT_KIND
from streamrl.weights.config import AUTO

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig

MODEL_FREE_CALLS = (GENERATE_CALL, REWARD_CALL, COST_CALL)
"""Calls of roles other than trained ones that have no model of their own to score with."""


def check_consistency(config: "RunConfig") -> None:
    """Run all checks across config sections. Raises ConfigError at the first contradiction."""
    check_conflicts(config, _iter_conflicts(config))
    if config.environment.is_enabled:
        config.data.shared_template  # noqa: B018 - raises if the files differ


def _iter_conflicts(config: "RunConfig") -> Iterator[Conflict]:
    yield from _iter_size_conflicts(config)
    yield from _iter_critic_conflicts(config)
    try:
        config.dataflow  # noqa: B018 - raises for a column that no stage produces
    except ValueError as error:
        raise ConfigError(str(error)) from error
    yield from _iter_model_conflicts(config)
    if config.placement.is_hybrid:
        yield from _iter_colocation_conflicts(config)
    if config.environment.is_enabled:
        yield from _iter_episode_conflicts(config)
    yield from _iter_score_conflicts(config)
    yield from _iter_pool_conflicts(config)


def _iter_size_conflicts(config: "RunConfig") -> Iterator[Conflict]:
    """Yield the rules on sizes of groups, steps and completions, and on staleness."""
    algorithm, groups = config.algorithm, config.pipeline.groups_per_step
    longest = config.max_completion_tokens
    yield (
        algorithm.overlong_buffer > longest,
        "algorithm.overlong_buffer",
        f"must be at most {config.completion_limit_key}={longest}",
    )
    yield (
        groups % algorithm.mini_batches,
        "algorithm.mini_batches",
        f"must divide pipeline.groups_per_step={groups}",
    )
    yield (
        config.filter.kind == "equal_rewards" and algorithm.group_size == 1,
        "filter.kind",
        "has no effect: algorithm.group_size=1 leaves no rewards to compare",
    )
    yield (
        (config.filter.oversample_factor or 1) > MOST_OVERSAMPLED,
        "filter.oversample",
        f"must be at most {MOST_OVERSAMPLED:g}",
    )
    # The last step before a publication trains on tokens publish_every - 1 versions old.
    lag = config.weights.publish_every - 1
    for key, bound in (
        ("max_staleness", config.pipeline.max_staleness),
        ("depth", config.pipeline.max_steps_ahead),
    ):
        yield (
            lag > bound,
            "weights.publish_every",
            f"the last step before a publication trains on tokens that are {lag} versions old, but"
            f" pipeline.{key}={bound}",
        )


def _iter_critic_conflicts(config: "RunConfig") -> Iterator[Conflict]:
    """Yield the rules on critic settings, and on a critic that shares the policy's model."""
    columns = config.algorithm.spec.columns
    critics = [role for column, role in CRITIC_BY_COLUMN.items() if column in columns]
    defaults, shares = vars(CriticConfig()), config.critic.shared_coef is not None
    # A separate critic inherits the settings of the trainer, which raise if they do not suit it.
    if config.critic.trainer != defaults["trainer"] or (critics and not shares):
        config.get_trainer_config(CRITIC)
    for key, default in defaults.items():
        yield (
            not critics and vars(config.critic)[key] != default,
            f"critic.{key}",
            f"has no effect: {config.algorithm.name} has no critic. Remove it or pass critic={{}}",
        )
    yield (
        shares and critics != [CRITIC],
        "critic.shared_coef",
        f"{config.algorithm.name} has {' and '.join(critics)}; only a single value critic can share"
        " the policy's model",
    )


def _iter_model_conflicts(config: "RunConfig") -> Iterator[Conflict]:
    """Yield the rules on references, scoring models and the way of weights to generators."""
    columns = list_required_columns(config.algorithm.spec, config.algorithm_settings)
    yield (
        config.reference.every and "ref_logprobs" not in columns,
        "reference.every",
        f"{config.algorithm.name} with algorithm.kl_coef={config.algorithm.kl_coef} uses no"
        " reference",
    )
    yield (
        config.reference.decay and config.trainer.lora_rank,
        "reference.decay",
        "averaging LoRA factors does not average the models; with"
        f" trainer.lora_rank={config.trainer.lora_rank} reference.decay must be 0",
    )
    without_model = {*config.dataflow.trained_roles, *(c.role for c in MODEL_FREE_CALLS)}
    reward_models = [entry for entry in (*config.rewards, *config.costs) if entry.kind == "model"]
    has_model = config.dataflow.calls_by_role.keys() - without_model or reward_models
    yield (
        config.scorer.offload and not has_model,
        "scorer.offload",
        "has no effect: the run has no reference, value or reward model. Remove it",
    )
    yield (
        bool(config.algorithm.ptx_coef) != bool(config.data.pretrain),
        "algorithm.ptx_coef",
        f"with data.pretrain={config.data.pretrain}; a pretraining loss needs both a coefficient"
        " and texts",
    )


def _iter_episode_conflicts(config: "RunConfig") -> Iterator[Conflict]:
    """Yield the rules on limits of episodes, and on algorithms that have none."""
    yield (
        config.generator.max_new_tokens > config.environment.max_tokens,
        "environment.max_tokens",
        f"must be at least generator.max_new_tokens={config.generator.max_new_tokens}, the limit of"
        " a turn",
    )
    yield (
        config.environment.episode_timeout_s >= config.pipeline.stall_s,
        "environment.episode_timeout_s",
        f"must be below pipeline.stall_s={config.pipeline.stall_s:g}, after which a step without a"
        " group, or an evaluation, is given up; raise pipeline.stall_s",
    )
    yield (
        any(call.stage == GREEDY_CALL.stage for call in config.dataflow.calls),
        "algorithm.name",
        "needs a greedy completion of each prompt, which episodes do not have; choose another"
        " algorithm, such as grpo",
    )


def _iter_score_conflicts(config: "RunConfig") -> Iterator[Conflict]:
    """Yield the rules on costs, and on rewards that an environment gives."""
    name, needs_costs = config.algorithm.name, "costs" in config.algorithm.spec.columns
    yield needs_costs and not config.costs, "costs", f"{name} needs one, written like a reward"
    yield (
        config.costs and not needs_costs,
        "algorithm.name",
        "uses no costs; to only log a score, add a reward of weight 0",
    )
    specs = config.environment.specs.values()
    yield (
        any(entry.kind == ENVIRONMENT_KIND for entry in config.rewards)
        and not any(spec.has_class for spec in specs),
        "environment.path",
        "a reward of kind environment needs a class with score(episode); tools alone score nothing",
    )


def _iter_pool_conflicts(config: "RunConfig") -> Iterator[Conflict]:
    """Yield the rules on placement.pools, and on the split of a generator that shares devices."""
    roles, placement = config.dataflow.calls_by_role, config.placement
    is_shared = any("generator" in pool for pool in placement.shared_pools)
    yield (
        config.generator.tensor_parallel > 1 and is_shared and not placement.is_hybrid,
        "generator.tensor_parallel",
        "needs dedicated devices, or those of a trainer's ranks; with"
        f" placement.mode={placement.mode} a generator shares one device",
    )
    yield (
        {role for pool in placement.pools for role in pool} - roles.keys(),
        "placement.pools",
        f"the roles of {config.algorithm.name} here are {', '.join(roles)}",
    )


def find_colocation_conflict(config: "RunConfig") -> str:
    """Return why generators cannot run inside the trainer's ranks, naming the setting, or ""."""
    return _format_first_conflict(config, _iter_colocation_conflicts(config))


def find_conflict_at_any_size(config: "RunConfig") -> str:
    """Return a setting that forbids a colocated run of any size, with the reason, or ""."""
    return _format_first_conflict(config, _iter_sizeless_conflicts(config))


def _format_first_conflict(config: "RunConfig", conflicts: Iterable[Conflict]) -> str:
    try:
        check_conflicts(config, conflicts)
    except ConfigError as error:
        return str(error)
    return ""


def _iter_colocation_conflicts(config: "RunConfig") -> Iterator[Conflict]:
    yield from _iter_sizeless_conflicts(config)
    generator, ranks = config.generator, config.trainer.world_size
    tp_size = generator.tensor_parallel
    hosts = "each" if tp_size == 1 else f"every group of generator.tensor_parallel={tp_size}"
    yield (
        ranks % tp_size,
        "generator.tensor_parallel",
        f"in a colocated run it must divide trainer.world_size={ranks}",
    )
    yield (
        generator.replicas not in (1, ranks // tp_size),
        "generator.replicas",
        f"in a colocated run {hosts} of trainer.world_size={ranks} ranks hosts a generator",
    )


def _iter_sizeless_conflicts(config: "RunConfig") -> Iterator[Conflict]:
    """Yield the rules of colocated runs that hold for any number of ranks."""
    weights = config.weights
    for applies, key, reason in (
        (weights.publish_every > 1, "weights.publish_every", "the weights change at every step"),
        (weights.transport != AUTO, "weights.transport", "weights need no transport"),
        (
            config.critic.shared_coef is not None,
            "critic.shared_coef",
            "the generator cannot share a policy that has a value head",
        ),
        (
            config.generator.threads != config.trainer.threads,
            "generator.threads",
            f"the generator uses the trainer.threads={config.trainer.threads} of its process",
        ),
    ):
        yield applies, key, f"in a colocated run {reason}"


def check_algorithm(config: "RunConfig") -> None:
    """Raise ConfigError if the algorithm fails on a synthetic step or ignores a setting."""
    # Imports torch, which takes a second.
    from streamrl.config.algorithm_dry_run import dry_run_algorithm, find_read_settings

    try:
        dry_run_algorithm(config.algorithm.spec, config.algorithm_settings)
    # The dry run raises no other error: it names the algorithm in each.
    except AlgorithmError as error:
        raise ConfigError(str(error)) from error
    if config.algorithm.spec is ALGORITHMS.get(config.algorithm.name):
        config.algorithm.check_unused_settings(
            find_read_settings(config.algorithm.spec, config.algorithm_settings)
        )


def count_trained_steps(config: "RunConfig", role: str) -> int:
    """Return the number of training steps that change a role's model.

    Steps of the critic warm-up leave the policy frozen and do not count for the policy.
    """
    frozen_steps = (
        config.critic.warmup_alone
        if role == POLICY and len(config.dataflow.trained_roles) > 1
        else 0
    )
    return max(1, config.run.steps - frozen_steps)
