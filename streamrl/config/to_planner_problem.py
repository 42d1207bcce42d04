"""What the planner is asked of a run: its models, its calls, and what a step is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from streamrl.config.run_config import RunConfig
from streamrl.data import load_prompt_files, open_training_files
from streamrl.dataflow import COST_CRITIC, CRITIC, POLICY, CallKind
from streamrl.errors import ConfigError
from streamrl.files.hf_config import read_model_length
from streamrl.placement import (
    Cluster,
    ModelShape,
    PlacementProblem,
    RunOptions,
    Workload,
    load_model_shape,
)
from streamrl.placement.costs import CostConstants
from streamrl.placement.costs.constants import UPPER_BOUNDS
from streamrl.placement.lora_params import add_lora_adapters
from streamrl.placement.workload import FixedLength, LengthDistribution
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.kinds.model import ModelOptions

CRITIC_ROLES = (CRITIC, COST_CRITIC)
REWARD_ROLES = ("reward", "cost")


@dataclass(frozen=True)
class PlannerRequest:
    """What a config does not say: sizes of models by role, in place of its own, and lengths.

    prompt_tokens: mean of a prompt. longest_prompt: null takes the mean. lengths: null takes
    generator.max_new_tokens for all completions, the most they can have. filtered: of all groups
    that are sampled, the part that dynamic sampling takes out.
    """

    prompt_tokens: float
    models: Mapping[str, str] = field(default_factory=dict)
    lengths: LengthDistribution | None = None
    filtered_fraction: float = 0.0
    max_prompt_tokens: int | None = None


def build_planner_problem(
    config: RunConfig, cluster: Cluster, asked: PlannerRequest
) -> PlacementProblem:
    """What the planner is asked of a run. Raises ConfigError for a model that cannot be sized."""
    algorithm, settings, generator = config.algorithm, config.algorithm_settings, config.generator
    longest_prompt = asked.max_prompt_tokens or max(1, round(asked.prompt_tokens))
    workload = Workload(
        config.pipeline.groups_per_step,
        algorithm.group_size,
        asked.prompt_tokens,
        asked.lengths or FixedLength(generator.max_new_tokens),
        settings.epochs,
        settings.mini_batches,
        config.pipeline.micro_batch_tokens,
        settings.scope == "step" or settings.num_updates > 1,
        asked.filtered_fraction,
        (longest_prompt, generator.max_new_tokens),
    )
    return PlacementProblem(
        config.dataflow,
        build_model_shapes(config, asked.models),
        workload,
        cluster,
        _build_run_options(config),
        _compute_score_tokens(config),
        (generator.kv_cache_mb or 0) << 20,
    )


def _compute_score_tokens(config: RunConfig) -> dict[str, int]:
    """By role that scores, most tokens that it computes at a time.

    A reward model has a setting of its own.
    """
    found = {}
    for call in config.dataflow.select_calls(CallKind.SCORE):
        judge = _find_model_reward(config, call.role) if call.role in REWARD_ROLES else None
        own = judge.options.get("batch_tokens", ModelOptions.batch_tokens) if judge else None
        found[call.role] = int(own or config.pipeline.micro_batch_tokens)
    return found


def build_model_shapes(config: RunConfig, named: Mapping[str, str]) -> dict[str, ModelShape]:
    """The shape of each role's model: as named, else of the directory the config has.

    A reward or a cost has one if it is named, or computed with a model.
    """
    roles = {call.followed_role or call.role for call in config.dataflow.calls}
    for role in named:
        if role not in roles:
            raise ConfigError(
                f"--model {role}={named[role]}: the run has models of {', '.join(sorted(roles))}"
            )
    policy = _load_model_shape(named.get(POLICY, config.model.path), POLICY)
    found = {POLICY: _with_trained_adapters(config, POLICY, policy)}
    for role in sorted(roles - {POLICY}):
        if role in named:
            shape = _load_model_shape(named[role], role)
        elif role in REWARD_ROLES:
            judge = _find_model_reward(config, role)
            if judge is None:
                continue
            shape = _load_model_shape(str(judge.options["path"]), role)
        elif role in CRITIC_ROLES and config.critic.path:
            shape = _load_model_shape(config.critic.path, role)
        else:
            # A reference that is moved is sent what the policy is trained by.
            shape = found[POLICY]
        shape = shape.to_critic() if role in (*CRITIC_ROLES, *REWARD_ROLES) else shape
        found[role] = _with_trained_adapters(config, role, shape)
    return found


def _with_trained_adapters(config: RunConfig, role: str, shape: ModelShape) -> ModelShape:
    """The shape with the adapters that are trained in its place, of a role that is trained."""
    if role not in config.dataflow.trained_roles:
        return shape
    trainer = config.get_trainer_config(role)
    setting = "trainer.lora_targets" if role == POLICY else "critic.trainer.lora_targets"
    return add_lora_adapters(shape, trainer.lora_rank, trainer.lora_targets, setting=setting)


def _load_model_shape(model: str, role: str) -> ModelShape:
    try:
        return load_model_shape(model)
    except ConfigError as error:
        raise ConfigError(f"{error}; streamrl plan --model {role}=NAME takes another") from None


def _find_model_reward(config: RunConfig, role: str) -> RewardConfig | None:
    """The first reward, or cost, that is computed with a model."""
    judges = config.rewards if role == "reward" else config.costs
    return next((judge for judge in judges if judge.kind == "model"), None)


def measure_prompt_tokens(config: RunConfig) -> tuple[float, int]:
    """Mean tokens of a prompt of data.train, and most of one of data.eval, too.

    As the model of the run reads them: what generates and what is stored has room for both. Raises
    ConfigError if that cannot be had.
    """
    try:
        limit = config.data.compute_prompt_limit(
            model_tokens=read_model_length(config.model.path, limit=config.model.max_length),
            max_new_tokens=config.generator.max_new_tokens,
        )
        data, model = config.data, config.model.path
        opened = open_training_files(
            data.train_files, model, limit=limit, on_long=data.on_long_prompt
        )
        evaluation = load_prompt_files(
            data.eval_files,
            model,
            limit=limit,
            on_long=data.on_long_prompt,
            most=config.evaluation.limit,
        )
    except ConfigError as error:
        raise ConfigError(f"{error}; --prompt-tokens N says how long prompts are") from None
    longest = max(
        [opened.max_prompt_tokens, *(len(prompt.token_ids) for prompt in evaluation.prompts)]
    )
    return opened.mean_prompt_tokens, longest


def build_run_constants(
    config: RunConfig, constants: CostConstants, *, on_gpu: bool
) -> CostConstants:
    """Constants with what the settings of a run say, and how streamrl runs it.

    A generator's weights, keys and values stay where they are while others compute beside it; on a
    GPU the weights are a copy. Raises ConfigError for more rollouts at the same time than can be.
    """
    running, most = config.generator.max_concurrent_rollouts, UPPER_BOUNDS["max_running"]
    if running > most:
        raise ConfigError(
            f"generator.max_concurrent_rollouts={running}: must be at most {most:.0f} to be planned"
        )
    return replace(
        constants,
        max_running=running,
        recompute=config.trainer.gradient_checkpointing,
        keeps_served=True,
        aliases_served=not on_gpu,
        keeps_kv=True,
    )


def _build_run_options(config: RunConfig) -> RunOptions:
    pipeline = config.pipeline
    return RunOptions(
        depth=pipeline.depth,
        on_stale=pipeline.on_stale,
        slice_s=config.placement.slice_s,
        publish_every=config.weights.publish_every,
        # One that does not move is followed by nobody.
        reference_every=config.reference.every or 1,
        oversample=config.filter.oversample_factor,
    )
