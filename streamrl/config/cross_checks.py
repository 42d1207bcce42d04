"""Checks across config sections, for settings that are valid alone and contradict each other.

Each check raises ConfigError with the setting, its value and the rule.
"""

from collections.abc import Iterable
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
from streamrl.rewards.kinds.rules import ENVIRONMENT_KIND
from streamrl.weights.config import AUTO, DISK

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig


def check_consistency(config: "RunConfig") -> None:
    """Run all checks across config sections. Raises ConfigError at the first contradiction."""
    _check_group_sizes(config)
    _check_critic_trainer(config)
    _check_publishing(config)
    _check_device_buckets(config)
    if config.placement.is_hybrid and (reason := find_colocation_conflict(config)):
        raise ConfigError(reason)
    _check_costs(config)
    _check_critic(config)
    _check_columns(config)
    _check_scorer_offload(config)
    _check_pools(config)
    _check_reference(config)
    _check_environment(config)
    if bool(config.algorithm.ptx_coef) != bool(config.data.pretrain):
        raise ConfigError(
            f"algorithm.ptx_coef={config.algorithm.ptx_coef}, data.pretrain="
            f"{config.data.pretrain}: a pretraining loss needs both a coefficient and texts"
        )


def _check_group_sizes(config: "RunConfig") -> None:
    """Check settings against the sizes of groups, steps and completions."""
    longest, buffer = config.max_completion_tokens, config.algorithm.overlong_buffer
    if buffer > longest:
        raise ConfigError(
            f"algorithm.overlong_buffer={buffer}: must be at most {config.completion_limit_key}="
            f"{longest}"
        )
    mini_batches, groups = config.algorithm.mini_batches, config.pipeline.groups_per_step
    if groups % mini_batches:
        raise ConfigError(
            f"algorithm.mini_batches={mini_batches}: must divide pipeline.groups_per_step={groups}"
        )
    if config.filter.kind == "equal_rewards" and config.algorithm.group_size == 1:
        raise ConfigError(
            "filter.kind=equal_rewards has no effect: algorithm.group_size=1 leaves no rewards to"
            " compare"
        )
    if (config.filter.oversample_factor or 1) > MOST_OVERSAMPLED:
        raise ConfigError(
            f"filter.oversample={config.filter.oversample}: must be at most {MOST_OVERSAMPLED:g}"
        )


def _check_device_buckets(config: "RunConfig") -> None:
    """Check that versions in GPU memory reach generators without host memory."""
    if config.weights.on_device and config.generator.tensor_parallel > 1:
        raise ConfigError(
            f"weights.on_device=true has no effect: with generator.tensor_parallel="
            f"{config.generator.tensor_parallel} versions reach a generator's ranks through host"
            " memory. Remove weights.on_device"
        )


def _check_scorer_offload(config: "RunConfig") -> None:
    """Check that there is a model whose weights scorer.offload may keep in host memory."""
    without_model = (*config.dataflow.trained_roles, GENERATE_CALL.role, REWARD_CALL.role)
    scorers = config.dataflow.calls_by_role.keys() - {*without_model, COST_CALL.role}
    reward_models = [entry for entry in (*config.rewards, *config.costs) if entry.kind == "model"]
    if config.scorer.offload and not scorers and not reward_models:
        raise ConfigError(
            "scorer.offload=true has no effect: the run has no reference, value or reward model."
            " Remove it"
        )


def _check_publishing(config: "RunConfig") -> None:
    """Check that publishing only every n-th version respects the staleness bounds of the pipeline.

    The last step before a publication trains on tokens n - 1 versions old.
    """
    publish_every = config.weights.publish_every
    for key, bound in (
        ("max_staleness", config.pipeline.max_staleness),
        ("depth", config.pipeline.max_steps_ahead),
    ):
        if publish_every > bound + 1:
            raise ConfigError(
                f"weights.publish_every={publish_every}: the last step before a publication trains"
                f" on tokens that are {publish_every - 1} versions old, but"
                f" pipeline.{key}={bound}"
            )


def _check_environment(config: "RunConfig") -> None:
    """Check that rewards, limits and algorithm suit episodes, or the lack of them."""
    environment, kinds = config.environment, [reward.kind for reward in config.rewards]
    if not environment.is_enabled:
        if ENVIRONMENT_KIND in kinds:
            raise ConfigError(
                f"rewards[{kinds.index(ENVIRONMENT_KIND)}].kind={ENVIRONMENT_KIND}: needs"
                " environment.path, the file of the environment"
            )
        return
    if ENVIRONMENT_KIND in kinds and not any(spec.has_class for spec in environment.specs.values()):
        raise ConfigError(
            f"rewards[{kinds.index(ENVIRONMENT_KIND)}].kind={ENVIRONMENT_KIND}: gives every episode"
            " 0, as environment.tools alone scores nothing; choose other rewards, or add"
            " environment.path with score(episode)"
        )
    config.data.shared_template  # noqa: B018 - raises if the files differ
    if config.generator.max_new_tokens > environment.max_tokens:
        raise ConfigError(
            f"environment.max_tokens={environment.max_tokens}: must be at least"
            f" generator.max_new_tokens={config.generator.max_new_tokens}, the limit of a turn"
        )
    if environment.episode_timeout_s >= config.pipeline.stall_s:
        raise ConfigError(
            f"environment.episode_timeout_s={environment.episode_timeout_s:g}: must be below"
            f" pipeline.stall_s={config.pipeline.stall_s:g}, after which a step without a group, or"
            " an evaluation, is given up; raise pipeline.stall_s"
        )
    if any(call.stage == GREEDY_CALL.stage for call in config.dataflow.calls):
        raise ConfigError(
            f"algorithm.name={config.algorithm.name}: needs a greedy completion of each prompt,"
            " which episodes do not have; choose another algorithm, such as grpo"
        )


def _check_pools(config: "RunConfig") -> None:
    """Check the roles in placement.pools, and the split of a generator that shares devices."""
    roles, tp_size = config.dataflow.calls_by_role, config.generator.tensor_parallel
    is_shared = any("generator" in pool for pool in config.placement.shared_pools)
    if tp_size > 1 and is_shared and not config.placement.is_hybrid:
        raise ConfigError(
            f"generator.tensor_parallel={tp_size}: needs dedicated devices, or those of a trainer's"
            f" ranks; with placement.mode={config.placement.mode} a generator shares one device"
        )
    for i, pool in enumerate(config.placement.pools):
        for role in pool:
            if role not in roles:
                raise ConfigError(
                    f"placement.pools[{i}].{role}: {config.algorithm.name} has no such role here;"
                    f" the roles are {', '.join(roles)}"
                )


def find_colocation_conflict(config: "RunConfig") -> str:
    """Return why generators cannot run inside the trainer's ranks, naming the setting, or ""."""
    generator, ranks = config.generator, config.trainer.world_size
    tp_size = generator.tensor_parallel
    hosts = "each" if tp_size == 1 else f"every group of generator.tensor_parallel={tp_size}"
    sizes = (
        (
            bool(ranks % tp_size),
            "generator.tensor_parallel",
            f"it must divide trainer.world_size={ranks}",
        ),
        (
            generator.replicas not in (1, ranks // tp_size),
            "generator.replicas",
            f"{hosts} of trainer.world_size={ranks} ranks hosts a generator",
        ),
    )
    return find_conflict_at_any_size(
        config, config.pipeline.max_staleness
    ) or _format_first_conflict(config, sizes)


def find_conflict_at_any_size(config: "RunConfig", max_staleness: int) -> str:
    """Return a setting that forbids a colocated run of any number of ranks, with the reason, or "".

    max_staleness: staleness bound to assume in place of the config's.
    """
    weights = config.weights
    drains = weights.on_update == "drain" and max_staleness > 0
    reasons = (
        (weights.publish_every > 1, "weights.publish_every", "the weights change at every step"),
        (weights.transport != AUTO, "weights.transport", "weights need no transport"),
        (drains, "weights.on_update", "rollouts cannot finish while the trainer computes"),
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
    )
    return _format_first_conflict(config, reasons)


def _format_first_conflict(config: "RunConfig", reasons: Iterable[tuple[bool, str, str]]) -> str:
    """Format the first conflict that applies, or return "".

    reasons: (applies, setting, reason) of each possible conflict.
    """
    for applies, setting, reason in reasons:
        if applies:
            section, key = setting.split(".")
            value = vars(vars(config)[section])[key]
            return f"{setting}={value}: in a colocated run {reason}"
    return ""


def _check_reference(config: "RunConfig") -> None:
    """Check that the algorithm uses the EMA reference, and that no LoRA factors are averaged."""
    every, decay = config.reference.every, config.reference.decay
    if every and "ref_logprobs" not in list_required_columns(
        config.algorithm.spec, config.algorithm_settings
    ):
        raise ConfigError(
            f"reference.every={every}: {config.algorithm.name} with"
            f" algorithm.kl_coef={config.algorithm.kl_coef} uses no reference"
        )
    if decay and config.trainer.lora_rank:
        raise ConfigError(
            f"reference.decay={decay}: averaging LoRA factors does not average the models;"
            f" with trainer.lora_rank={config.trainer.lora_rank} reference.decay must be 0"
        )


def _list_critic_roles(config: "RunConfig") -> list[str]:
    """Return the roles of the critics that produce columns the algorithm requires."""
    columns = config.algorithm.spec.columns
    return [role for column, role in CRITIC_BY_COLUMN.items() if column in columns]


def _check_critic_trainer(config: "RunConfig") -> None:
    """Check critic.trainer if the user set it, or if the run trains a separate critic.

    A separate critic inherits the settings of the trainer.
    """
    is_set = config.critic.trainer != CriticConfig().trainer
    if is_set or (_list_critic_roles(config) and config.critic.shared_coef is None):
        config.get_trainer_config(CRITIC)


def _check_critic(config: "RunConfig") -> None:
    """Check that critic settings take effect, and suit a critic that shares the policy's model."""
    critics = _list_critic_roles(config)
    for key, default in vars(CriticConfig()).items():
        if not critics and vars(config.critic)[key] != default:
            raise ConfigError(
                f"critic.{key}={vars(config.critic)[key]} has no effect: {config.algorithm.name}"
                " has no critic. Remove it (or pass critic={})"
            )
    if config.critic.shared_coef is not None and critics != [CRITIC]:
        raise ConfigError(
            f"critic.shared_coef={config.critic.shared_coef}: {config.algorithm.name} has"
            f" {' and '.join(critics)}; only a single value critic can share the policy's model"
        )
    if config.critic.shared_coef is not None and config.weights.transport == DISK:
        raise ConfigError(
            "weights.transport=disk: published versions must be plain models, and with"
            f" critic.shared_coef={config.critic.shared_coef} the policy has a value head"
        )


def _check_columns(config: "RunConfig") -> None:
    """Raise ConfigError if the algorithm requires a column that no stage produces."""
    try:
        config.dataflow  # noqa: B018
    # The error of a dataflow with a column that no stage produces.
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_algorithm(config: "RunConfig") -> None:
    """Raise ConfigError if the algorithm fails on a synthetic step or ignores a setting."""
    # Imports torch, which takes a second.
    from streamrl.algorithms.dry_run import dry_run_algorithm, find_read_settings

    try:
        dry_run_algorithm(config.algorithm.spec, config.algorithm_settings)
    # The dry run raises no other error: it names the algorithm in each.
    except AlgorithmError as error:
        raise ConfigError(str(error)) from error
    if config.algorithm.spec is ALGORITHMS.get(config.algorithm.name):
        config.algorithm.check_unused_settings(
            find_read_settings(config.algorithm.spec, config.algorithm_settings)
        )


def _check_costs(config: "RunConfig") -> None:
    """Check that the config has costs exactly if the algorithm requires the column `costs`."""
    needs_costs = "costs" in config.algorithm.spec.columns
    if needs_costs and not config.costs:
        raise ConfigError(
            f"costs: empty; {config.algorithm.name} needs at least one entry, written like a reward"
        )
    if config.costs and not needs_costs:
        raise ConfigError(
            f"costs: {config.algorithm.name} uses none; to only log a score, add a reward of"
            " weight 0"
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
