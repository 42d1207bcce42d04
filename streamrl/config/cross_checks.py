"""What the settings of one room say to those of another: a run whose settings disagree is refused.

Each check raises ConfigError naming the setting, its value and the rule.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from streamrl.algorithms.columns import list_required_columns
from streamrl.algorithms.table import ALGORITHMS
from streamrl.buffer.admission.oversampling import MAX_FACTOR as MOST_OVERSAMPLED
from streamrl.dataflow import CRITIC, CRITIC_BY_COLUMN, POLICY, build_dataflow
from streamrl.engines.trainer_config import CriticConfig
from streamrl.errors import AlgorithmError, ConfigError
from streamrl.weights.config import AUTO, DISK

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig


def check_consistency(config: "RunConfig") -> None:
    """Raise ConfigError for the first disagreement."""
    _check_group_sizes(config)
    _check_critic_trainer(config)
    _check_publishing(config)
    if config.placement.is_hybrid and (reason := find_colocation_conflict(config)):
        raise ConfigError(reason)
    _check_costs(config)
    _check_critic(config)
    _check_columns(config)
    _check_pools(config)
    _check_reference(config)
    if bool(config.algorithm.ptx_coef) != bool(config.data.pretrain):
        raise ConfigError(
            f"algorithm.ptx_coef={config.algorithm.ptx_coef}: goes with data.pretrain="
            f"{config.data.pretrain}: a pretraining loss has both a weight and texts"
        )


def _check_group_sizes(config: "RunConfig") -> None:
    longest, buffer = config.generator.max_new_tokens, config.algorithm.overlong_buffer
    if buffer > longest:
        raise ConfigError(
            f"algorithm.overlong_buffer={buffer}: must be at most generator.max_new_tokens="
            f"{longest}"
        )
    rollouts = config.algorithm.group_size * config.pipeline.groups_per_step
    if config.algorithm.kl_target is not None and config.algorithm.kl_horizon < rollouts:
        raise ConfigError(
            f"algorithm.kl_horizon={config.algorithm.kl_horizon}: must be at least the {rollouts}"
            " rollouts of a step"
        )
    parts, groups = config.algorithm.mini_batches, config.pipeline.groups_per_step
    if groups % parts:
        raise ConfigError(
            f"algorithm.mini_batches={parts}: must divide pipeline.groups_per_step={groups}"
        )
    if config.filter.kind == "equal_rewards" and config.algorithm.group_size == 1:
        raise ConfigError(
            "filter.kind=equal_rewards: takes out none of algorithm.group_size=1, as there is"
            " nothing to be equal to"
        )
    if (config.filter.oversample_factor or 1) > MOST_OVERSAMPLED:
        raise ConfigError(
            f"filter.oversample={config.filter.oversample}: must be at most {MOST_OVERSAMPLED:g}"
        )


def _check_publishing(config: "RunConfig") -> None:
    """The last step before a version is published is trained on the one before it."""
    every = config.weights.publish_every
    for key, bound in (
        ("max_staleness", config.pipeline.max_staleness),
        ("depth", config.pipeline.max_steps_ahead),
    ):
        if every > bound + 1:
            raise ConfigError(
                f"weights.publish_every={every}: the last step before a version would be"
                f" trained on tokens that are {every - 1} versions old, but"
                f" pipeline.{key}={bound}"
            )


def _check_pools(config: "RunConfig") -> None:
    roles, split = config.dataflow.calls_by_role, config.generator.tensor_parallel
    shares = any("generator" in pool for pool in config.placement.shared_pools)
    if split > 1 and shares and not config.placement.is_hybrid:
        raise ConfigError(
            f"generator.tensor_parallel={split}: needs devices of its own, or those of a trainer's"
            f" ranks; with placement.mode={config.placement.mode} a generator has a part of one"
        )
    for i, pool in enumerate(config.placement.pools):
        for role in pool:
            if role not in roles:
                raise ConfigError(
                    f"placement.pools[{i}].{role}: {config.algorithm.name} has none here; its roles"
                    f" are {', '.join(roles)}"
                )


def find_colocation_conflict(config: "RunConfig") -> str:
    """Why trainer and generators cannot share processes, if so: setting, value and reason."""
    generator, ranks = config.generator, config.trainer.world_size
    split = generator.tensor_parallel
    sizes = (
        (
            bool(ranks % split),
            "generator.tensor_parallel",
            f"it must divide trainer.world_size={ranks}",
        ),
        (
            generator.replicas not in (1, ranks // split),
            "generator.replicas",
            f"{_describe_generator_hosts(split)} of trainer.world_size={ranks} ranks has"
            f" a generator",
        ),
    )
    return find_conflict_at_any_size(
        config, config.pipeline.max_staleness
    ) or _format_first_conflict(config, sizes)


def find_conflict_at_any_size(config: "RunConfig", max_staleness: int) -> str:
    """The same under another bound of staleness, whatever numbers of ranks and replicas are."""
    weights = config.weights
    drains = weights.on_update == "drain" and max_staleness > 0
    reasons = (
        (weights.publish_every > 1, "weights.publish_every", "the weights change at every step"),
        (weights.transport != AUTO, "weights.transport", "weights do not travel"),
        (drains, "weights.on_update", "rollouts cannot end while others compute"),
        (
            config.critic.shared_coef is not None,
            "critic.shared_coef",
            "nobody else can follow the policy",
        ),
        (
            config.generator.threads != config.trainer.threads,
            "generator.threads",
            f"it computes with the trainer.threads={config.trainer.threads} of its process",
        ),
    )
    return _format_first_conflict(config, reasons)


def _format_first_conflict(config: "RunConfig", reasons: Iterable[tuple[bool, str, str]]) -> str:
    for applies, setting, reason in reasons:
        if applies:
            section, key = setting.split(".")
            value = vars(vars(config)[section])[key]
            return f"{setting}={value}: in a colocated run {reason}"
    return ""


def _describe_generator_hosts(split: int) -> str:
    return "each" if split == 1 else f"every team of generator.tensor_parallel={split}"


def _check_reference(config: "RunConfig") -> None:
    every, decay = config.reference.every, config.reference.decay
    if every and "ref_logprobs" not in list_required_columns(
        config.algorithm.spec, config.algorithm_settings
    ):
        raise ConfigError(
            f"reference.every={every}: {config.algorithm.name} with"
            f" algorithm.kl_coef={config.algorithm.kl_coef} has no reference"
        )
    if decay and config.trainer.lora_rank:
        raise ConfigError(
            f"reference.decay={decay}: an average of adapters is no average of models;"
            f" with trainer.lora_rank={config.trainer.lora_rank} it must be 0"
        )


def _list_critic_roles(config: "RunConfig") -> list[str]:
    columns = config.algorithm.spec.columns
    return [role for column, role in CRITIC_BY_COLUMN.items() if column in columns]


def _check_critic_trainer(config: "RunConfig") -> None:
    """What a critic takes over from the policy is wrong only where there is one, apart from it."""
    is_said = config.critic.trainer != CriticConfig().trainer
    if is_said or (_list_critic_roles(config) and config.critic.shared_coef is None):
        config.get_trainer_config(CRITIC)


def _check_critic(config: "RunConfig") -> None:
    critics = _list_critic_roles(config)
    for key, default in vars(CriticConfig()).items():
        if not critics and vars(config.critic)[key] != default:
            raise ConfigError(
                f"critic.{key}={vars(config.critic)[key]}: {config.algorithm.name} has no critic;"
                " critic={} takes all of it back"
            )
    if config.critic.shared_coef is not None and critics != [CRITIC]:
        raise ConfigError(
            f"critic.shared_coef={config.critic.shared_coef}: {config.algorithm.name} has"
            f" {' and '.join(critics)}; it is one critic that can share the policy's model"
        )
    if config.critic.shared_coef is not None and config.weights.transport == DISK:
        raise ConfigError(
            "weights.transport=disk: a version has to be a model others can load, and with"
            f" critic.shared_coef={config.critic.shared_coef} the policy's has a critic's head"
        )
    if config.critic.shared_coef is not None and not config.algorithm.correction.count_rejected:
        raise ConfigError(
            "algorithm.correction.count_rejected=False: with critic.shared_coef values are"
            " learned from all tokens, and divided by as many"
        )


def _check_columns(config: "RunConfig") -> None:
    try:
        # A column that nobody makes is told here.
        build_dataflow(list_required_columns(config.algorithm.spec, config.algorithm_settings))
    except (AlgorithmError, ValueError) as error:
        raise ConfigError(str(error)) from error


def check_algorithm(config: "RunConfig") -> None:
    """Raise ConfigError if the algorithm fails on a made-up step, or ignores a setting."""
    # It computes, and torch takes a second to import.
    from streamrl.algorithms.dry_run import dry_run_algorithm, find_read_settings

    try:
        dry_run_algorithm(config.algorithm.spec, config.algorithm_settings)
    except (AlgorithmError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if config.algorithm.spec is ALGORITHMS.get(config.algorithm.name):
        config.algorithm.check_unused_settings(
            find_read_settings(config.algorithm.spec, config.algorithm_settings)
        )


def _check_costs(config: "RunConfig") -> None:
    wanted = "costs" in config.algorithm.spec.columns
    if wanted and not config.costs:
        raise ConfigError(
            f"costs: empty; {config.algorithm.name} needs at least one, written as a reward is"
        )
    if config.costs and not wanted:
        raise ConfigError(
            f"costs: {config.algorithm.name} has no use for them; a reward of weight 0 is logged"
        )


def count_trained_steps(config: "RunConfig", role: str) -> int:
    """The steps of a run in which the model of a role is trained: in some the policy may rest."""
    rests = (
        config.critic.warmup_alone
        if role == POLICY and len(config.dataflow.trained_roles) > 1
        else 0
    )
    return max(1, config.run.steps - rests)
