"""RunConfig: all config sections of a run, read from YAML and key=value overrides."""

import contextlib
import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from streamrl.algorithms import list_required_columns
from streamrl.algorithms.algorithm import AlgorithmSettings
from streamrl.algorithms.config import AlgorithmConfig
from streamrl.algorithms.correction import NO_CORRECTION, CorrectionConfig
from streamrl.algorithms.table import ALGORITHMS
from streamrl.buffer.config import QueueConfig
from streamrl.buffer.staleness_credits import MAX_FACTOR as MOST_OVERSAMPLED
from streamrl.buffer.staleness_credits import bound_group_bytes
from streamrl.config.removed_settings import drop_removed_settings
from streamrl.data.config import FILE_KEYS, DataConfig, make_paths_absolute
from streamrl.data.replays import ReplayConfig
from streamrl.dataflow import (
    COST_CALL,
    COST_VALUE_CALL,
    CRITIC,
    CRITIC_BY_COLUMN,
    CRITIC_ROLES,
    EPISODES,
    GENERATE_CALL,
    GENERATOR,
    GREEDY_CALL,
    POLICY,
    REF_LOGPROBS,
    REFERENCE_CALL,
    REWARD_CALL,
    REWARD_ROLES,
    ROWS,
    TOP_COLUMNS,
    VALUE_CALL,
    CallKind,
    Dataflow,
    ModelCall,
    build_dataflow,
)
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.models.tensor_parallel_support import get_expert_sizes
from streamrl.engines.trainer_config import (
    CriticConfig,
    CriticTrainerConfig,
    RankLayout,
    ReferenceConfig,
    TrainerConfig,
)
from streamrl.environments.config import EnvironmentConfig
from streamrl.errors import AlgorithmError, ConfigError, extend_errors, get_first_line
from streamrl.files.bounded_read import read_small_yaml, wrap_file_errors
from streamrl.files.hf_config import read_model_config, read_model_length, read_vocab_size
from streamrl.files.typed_settings import (
    Conflict,
    at_least,
    check_conflicts,
    find_conflict,
    get_fields,
    iter_settings,
    merge_settings,
    prepare_settings,
    suggest_nearest,
)
from streamrl.messages import PAIRS, REF_TOP_IDS, ROLLOUTS, STATE_COLUMN, TOKEN_SCORES
from streamrl.placement.config import PlacementConfig
from streamrl.rewards.group_filter import FilterConfig
from streamrl.rewards.interface.config import (
    RewardConfig,
    SandboxConfig,
    ScorerConfig,
)
from streamrl.rewards.interface.reward import RewardContext, RewardSpec
from streamrl.rewards.kinds.model import ModelOptions
from streamrl.rewards.kinds.rules import ENVIRONMENT_KIND
from streamrl.rewards.registry import find_split_model
from streamrl.rewards.reward_set import SCORE_SPECS
from streamrl.run_dir.checkpoint import CheckpointConfig, find_model_dir
from streamrl.run_dir.run_config_file import check_run_dir
from streamrl.stream.evaluation.config import MAX_SEED, EvaluationConfig
from streamrl.stream.run_state import PipelineConfig
from streamrl.telemetry.config import TelemetryConfig
from streamrl.weights import WeightsConfig
from streamrl.weights.config import AUTO

if TYPE_CHECKING:
    from streamrl.data.prompt_file import PromptLimits

#: Settings of other systems that streamrl refuses on purpose, with the reason.
UNSUPPORTED_SETTINGS = dict.fromkeys(
    ("generator.top_p", "generator.top_k", "generator.min_p"),
    "set generator.sampling_mask={top_k: 50, top_p: 0.95}, with which the trainer renormalizes;"
    " evaluation.top_p and evaluation.top_k are apart",
)


def _suggest_key(key: str, section: Any) -> str:
    """Return a hint for an unknown key: why it is refused, or a similar key, maybe elsewhere.

    section: dataclass that should have the key.
    """
    parent, _, name = key.rpartition(".")
    if section is DataConfig and name in FILE_KEYS:
        return f"set it per file, as in data.train={{path: ..., {name}: ...}}"
    if key in UNSUPPORTED_SETTINGS:
        return UNSUPPORTED_SETTINGS[key]
    siblings = get_fields(section)
    if close := difflib.get_close_matches(name, siblings, n=1):
        return f"the nearest key is {f'{parent}.{close[0]}'.removeprefix('.')}"
    elsewhere = [other for other, _ in iter_settings(RunConfig) if other.rpartition(".")[2] == name]
    close = difflib.get_close_matches(key, elsewhere, n=1, cutoff=0.0)
    return f"the nearest key is {close[0]}" if close else suggest_nearest(name, siblings)


MAX_NAME_BYTES = 200


@dataclass
class RunSettings:
    """General settings of the run.

    name: name of the run directory, dir/name.
    dir: parent folder of run directories.
    seed: seed of the prompt order and of every rollout.
    steps: training steps in total, including those before a resume.
    overwrite: replace an existing run directory of the same name.
    max_restarts: restarts of each generator or scorer after it dies.
    silent_s: seconds without an answer after which a process counts as dead. Generators, scorers
        and shards are then killed and restarted; others are only reported. Set
        it above the longest load of a model, during which a process cannot answer.
    """

    name: str = "run"
    dir: str = "runs"
    seed: Annotated[int, at_least(0, MAX_SEED)] = 0
    steps: Annotated[int, at_least(1)] = 100
    overwrite: bool = False
    max_restarts: Annotated[int, at_least(0)] = 3
    silent_s: Annotated[float, at_least(1)] = 120.0

    def __post_init__(self) -> None:
        is_plain = self.name not in ("", ".", "..") and "/" not in self.name
        if not is_plain or not self.name.isprintable() or len(self.name.encode()) > MAX_NAME_BYTES:
            raise ConfigError(
                f"run.name={self.name!r}: must be a plain folder name of at most"
                f" {MAX_NAME_BYTES} bytes"
            )


@dataclass
class ModelConfig:
    """Starting point of the policy.

    path: Hugging Face model directory.
    max_length: maximum tokens of prompt plus completion; null takes the model's own limit.
    trust_remote_code: run Python files that the directory (or the critic's, or the reference's)
        contains for its model or tokenizer (auto_map). Without trust_remote_code such a directory
        is refused.
    """

    path: str = ""
    max_length: Annotated[int | None, at_least(2)] = None
    trust_remote_code: bool = False


ConfigT = TypeVar("ConfigT", bound="ConfigSections")


@dataclass
class ConfigSections:
    """Config sections, each checked alone. They need not be enough for a run."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rewards: list[RewardConfig] = field(default_factory=list)
    #: entries like those of `rewards`, for constrained algorithms.
    costs: list[RewardConfig] = field(default_factory=list)
    filter: FilterConfig = field(default_factory=FilterConfig)
    scorer: ScorerConfig = field(default_factory=ScorerConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    @property
    def reads_rows(self) -> bool:
        """True if the run trains on completions in the data: no generator, no reward.

        False for sections alone, with which a model is evaluated or its data shown.
        """
        return False

    @property
    def max_completion_tokens(self) -> int:
        """Most tokens that follow the prompt of a row: of a completion, or of a whole episode.

        0 if the row gives the completion, which then counts as a part of its prompt.
        """
        if self.reads_rows:
            return 0
        if self.environment.is_enabled:
            return self.environment.max_tokens
        return self.generator.max_new_tokens

    def make_prompt_limits(self, model: str, *, most_tokens: int | None) -> "PromptLimits":
        """Return the limits of prompts for a model, of whose context `most_tokens` are used.

        Raises ConfigError if the model cannot be read, or leaves no room for a prompt.
        """
        # Reads data files, which most commands do not.
        from streamrl.data.prompt_file import PromptLimits

        most = self.data.compute_prompt_limit(
            model_tokens=read_model_length(model, limit=most_tokens),
            max_new_tokens=self.max_completion_tokens,
            key=self.completion_limit_key,
        )
        environments = None if self.reads_rows else tuple(self.environment.specs)
        return PromptLimits(most, read_vocab_size(model), self.data.on_long_prompt, environments)

    @property
    def completion_limit_key(self) -> str:
        """Setting that gives `max_completion_tokens`, for messages."""
        has_episodes = self.environment.is_enabled
        return "environment.max_tokens" if has_episodes else "generator.max_new_tokens"


@dataclass
class RunConfig(ConfigSections):
    """Settings of a run: complete, and consistent across the config sections."""

    def __post_init__(self) -> None:
        if not self.model.path:
            raise ConfigError("model.path: missing; it names a Hugging Face model directory")
        if not self.data.train:
            raise ConfigError("data.train: missing; it names a file of prompts")
        if not self.rewards and not self.reads_rows:
            raise ConfigError("rewards: empty; a run needs at least one, e.g. [{kind: exact}]")
        for role, score_spec in SCORE_SPECS.items():
            find_split_model(self.get_rewards(role), score_spec)
        check_conflicts(self, _iter_conflicts(self))
        if self.environment.is_enabled and not self.reads_rows:
            self.data.check_shared_template()

    @property
    def needs_resharding(self) -> bool:
        """True if the trainer's ranks reshard each version for the generators inside them.

        In a colocated run a rank may train another part of the policy than its generator serves.
        """
        is_split = self.generator.tensor_parallel > 1
        return self.placement.is_hybrid and (self.trainer.has_sharded_params or is_split)

    @property
    def reads_rows(self) -> bool:
        return self.algorithm.spec.trains_on != ROLLOUTS

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @property
    def algorithm_settings(self) -> AlgorithmSettings:
        """Algorithm settings, with defaults that depend on other config sections filled in.

        Those on how rollouts are sampled, corrected and shaped do not hold for rows of the data.
        """
        settings = self.algorithm.to_settings(
            max_length=self.max_completion_tokens or self.pipeline.micro_batch_tokens,
            reward_weights={reward.component_name: reward.weight for reward in self.rewards},
            has_episodes=self.environment.is_enabled and not self.reads_rows,
            splits_episodes=self.max_rollouts_per_episode > 1,
            has_sampling_mask=bool(self.generator.sampling_mask),
        )
        if not self.reads_rows:
            return settings
        own: dict[str, Any] = {"group_size": 1, "overlong_buffer": 0, "mask_truncated": False}
        own |= {"has_sampling_mask": False, "router_replay": "off"}
        return dataclasses.replace(settings, correction=CorrectionConfig(), **own)

    @property
    def dataflow(self) -> Dataflow:
        """Model calls of the algorithm and the columns between them.

        Raises ConfigError for a column that no stage produces.
        """
        columns = list_required_columns(self.algorithm.spec, self.algorithm_settings)
        source = EPISODES if self.environment.is_enabled else GENERATOR
        source = ROWS if self.reads_rows else source
        try:
            return build_dataflow(
                columns,
                shares_critic=self.critic.shared_coef is not None,
                moves_reference=bool(self.reference.every),
                has_filter=self.filter.is_enabled and not self.reads_rows,
                source=source,
                hosts=self.hosts,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def temperature(self) -> float:
        """Temperature of log-probabilities: that of sampling; 1 where nobody samples."""
        return 1.0 if self.reads_rows else self.generator.temperature

    @property
    def max_rollouts_per_episode(self) -> int:
        """Most samples of an episode; those of a pair are of one, so that they train together."""
        if self.reads_rows:
            return 2 if self.algorithm.spec.trains_on == PAIRS else 1
        return self.environment.max_rollouts_per_episode

    @property
    def hosts(self) -> dict[str, str]:
        """Trained role whose ranks hold the model of a scoring role, by scoring role.

        Without shadow critics the critic's ranks compute its values, and the reference of LoRA is
        the policy below its adapters.
        """
        hosts = {}
        if not self.critic.replicas:
            shares = self.critic.shared_coef is not None
            for call in (VALUE_CALL, COST_VALUE_CALL):
                hosts[call.role] = POLICY if shares else call.followed_role
        reference = self.reference
        is_initial = not reference.path and not reference.every and reference.replicas is None
        if self.trainer.lora_rank and is_initial:
            hosts[REFERENCE_CALL.role] = POLICY
        return hosts

    @property
    def max_open_rollouts(self) -> int:
        """Most rollouts that a generator works on, those that wait for their environment included.

        Without an environment they are those that the engine samples.
        """
        in_engine = self.generator.max_concurrent_rollouts
        return self.environment.open_episodes or in_engine

    def get_trainer_config(self, role: str) -> TrainerConfig:
        """Return the training settings of a role: `trainer`, for critics changed by critic.trainer.

        Raises ConfigError for an invalid critic.trainer.
        """
        if role == POLICY:
            return self.trainer
        return _make_critic_trainer(self.trainer, self.critic.trainer)

    def get_ranks_config(self, call: ModelCall) -> TrainerConfig:
        """Return the settings of the ranks that hold the model of a call, trained or not."""
        if call.role in self.dataflow.trained_roles:
            return self.get_trainer_config(call.role)
        if split := self.find_split_reward(call.role):
            return split.options.to_ranks_config(split.key)
        whole = dict.fromkeys(REWARD_ROLES, RankLayout())
        layouts = {REFERENCE_CALL.role: self.reference, **whole}
        layout = layouts.get(call.role, self.critic.shadow)
        followed = call.followed_role if call.followed_role in CRITIC_ROLES else POLICY
        return layout.to_trainer_config(self.get_trainer_config(followed))

    def get_ranks_section(self, call: ModelCall) -> str:
        """Return the section with the numbers of ranks and replicas of a call, for messages."""
        if call.kind is CallKind.GENERATE:
            return "generator"
        return self.get_ranks_config(call).section or "scorer"

    def find_split_reward(self, role: str) -> RewardSpec[ModelOptions] | None:
        """Return a role's reward or cost whose model several ranks hold; None if there is none."""
        if not self.list_model_rewards(role):
            return None  # without reading all options, for callers that ask often
        score_spec, context = SCORE_SPECS[role], RewardContext(self.scorer, self.sandbox)
        return find_split_model(self.get_rewards(role), score_spec, context)

    def list_model_rewards(self, role: str) -> list[RewardConfig]:
        """Return the entries of kind model among a role's rewards or costs."""
        return [entry for entry in self.get_rewards(role) if entry.kind == "model"]

    def get_rewards(self, role: str) -> list[RewardConfig]:
        """Return the rewards or costs by which a role scores; none for a role with a model."""
        if self.reads_rows:
            return []
        return {REWARD_CALL.role: self.rewards, COST_CALL.role: self.costs}.get(role, [])

    def get_model_path(self, role: str) -> str:
        """Return the model directory from which a role starts: policy, critic or reference."""
        paths = dict.fromkeys(CRITIC_ROLES, self.critic.path)
        return {**paths, REFERENCE_CALL.role: self.reference.path}.get(role) or self.model.path

    @property
    def trusted_models(self) -> list[str]:
        """Model directories that may run their own Python code.

        Empty unless model.trust_remote_code.
        """
        roles = (POLICY, CRITIC, REFERENCE_CALL.role) * self.model.trust_remote_code
        return [self.get_model_path(role) for role in roles]

    @property
    def reads_states(self) -> bool:
        """True if the algorithm compares turns in equal states of the environment."""
        return STATE_COLUMN in self.algorithm.spec.columns

    @property
    def capacity_groups(self) -> int:
        """Number of groups that the queue may hold: as many as the pipeline keeps in flight."""
        in_flight = (self.pipeline.max_steps_ahead + 1) * self.pipeline.groups_per_step
        return math.ceil(in_flight * (self.filter.oversample_factor or MOST_OVERSAMPLED))

    @property
    def component_columns(self) -> tuple[str, ...]:
        """Queue columns of the single rewards and costs, from which score and cost are combined."""
        return tuple(
            score_spec.column_prefix + entry.component_name
            for role, score_spec in SCORE_SPECS.items()
            for entry in self.get_rewards(role)
        )

    @property
    def score_part_columns(self) -> tuple[str, ...]:
        """Queue columns that come with scores and costs, and that trainers read."""
        by_token = (TOKEN_SCORES,) if self.algorithm.spec.reads_token_scores else ()
        return (*self.component_columns, *by_token)

    @property
    def extra_score_columns(self) -> tuple[str, ...]:
        """Columns that rewards make for the algorithm's credit and for the choice of prompts."""
        by_token = (TOKEN_SCORES,) if self.algorithm.spec.reads_token_scores else ()
        reads_rates = self.data.sampling == "difficulty" or self.data.replay
        return (*by_token, *(("pass_rate",) if reads_rates else ()))

    @property
    def column_widths(self) -> dict[str, int]:
        """Most entries per token of the wide columns."""
        widths = {"sampling_mask": self.generator.num_mask_words}
        if REF_TOP_IDS in self.algorithm.spec.columns:
            top_k = int(self.algorithm_settings.params["top_k"])
            most = min(top_k, read_vocab_size(self.model.path))
            widths |= dict.fromkeys(TOP_COLUMNS, most)
        if self.returns_experts:
            sizes = get_expert_sizes(read_model_config(self.model.path))
            widths["routed_experts"] = sizes.num_layers * sizes.top_k
        return widths

    @property
    def returns_experts(self) -> bool:
        """True if generators return the experts that they chose for each token."""
        return self.algorithm_settings.router_replay in ("measure", "r3")

    def bound_group_bytes(self, tokens: int) -> int:
        """Return the bytes of the largest group that the run can store in the queue.

        tokens: those of the longest rollout.
        """
        return bound_group_bytes(
            [call.produces for call in self.dataflow.calls],
            self.score_part_columns,
            rollouts=self.algorithm.group_size * self.max_rollouts_per_episode,
            tokens=tokens,
            turns=self.environment.max_turns,
            widths=self.column_widths,
        )


# Checks across sections, of settings that are valid alone and contradict each other. Each raises
# ConfigError with the setting, its value and the rule.


def _iter_conflicts(config: RunConfig) -> Iterator[Conflict]:
    yield from _iter_size_conflicts(config)
    yield from _iter_critic_conflicts(config)
    yield from _iter_model_conflicts(config)
    yield from _iter_replay_conflicts(config)
    if config.placement.is_hybrid:
        yield from _iter_colocation_conflicts(config)
    if config.reads_rows:
        yield from _iter_row_conflicts(config)
    else:
        if config.environment.is_enabled:
            yield from _iter_episode_conflicts(config)
        yield from _iter_score_conflicts(config)
        if (replay := config.data.read_replay()) is not None:
            yield from _iter_group_replay_conflicts(config, replay)
    yield from _iter_pool_conflicts(config)


def _iter_size_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield the rules on sizes of groups, steps and completions, and on staleness."""
    algorithm, groups = config.algorithm, config.pipeline.groups_per_step
    longest = config.max_completion_tokens
    yield (
        config.reads_states and not config.environment.is_enabled,
        "algorithm.name",
        "compares turns in equal states of an environment. Set environment.path",
    )
    yield (
        algorithm.overlong_buffer > longest and not config.reads_rows,
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
    learns_from_reference = REF_LOGPROBS in algorithm.spec.columns
    yield (
        config.filter.kind == "equal_rewards"
        and learns_from_reference
        and not config.algorithm_settings.params.get("task_weight"),
        "filter.kind",
        f"would drop groups of equal rewards, from which {algorithm.name} learns as much as from"
        " others: its advantages come from the reference. Set none, or algorithm.params.task_weight"
        " above 0",
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


def _iter_critic_conflicts(config: RunConfig) -> Iterator[Conflict]:
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


def _iter_model_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield the rules on references, scoring models and the way of weights to generators."""
    columns = list_required_columns(config.algorithm.spec, config.algorithm_settings)
    unused = (
        f"{config.algorithm.name} with algorithm.kl_coef={config.algorithm.kl_coef} uses no"
        " reference; set algorithm.kl_coef, or leave it out"
    )
    for key in ("path", "every", "replicas"):
        is_set = vars(config.reference)[key]
        yield is_set and "ref_logprobs" not in columns, f"reference.{key}", unused
    is_hosted = REFERENCE_CALL.role in config.hosts and "ref_logprobs" in columns
    yield (
        config.reference.world_size > 1
        and REFERENCE_CALL.role not in config.dataflow.calls_by_role,
        "reference.world_size",
        "has no effect: below the adapters the policy's ranks have the reference. Set"
        " reference.replicas=1"
        if is_hosted
        else unused,
    )
    yield (
        bool(config.generator.sampling_mask) and REF_TOP_IDS in config.algorithm.spec.columns,
        "generator.sampling_mask",
        f"{config.algorithm.name} compares whole distributions, and the policy's has the words kept"
        " alone. Leave it out, or set algorithm.name=distill",
    )
    for section in ("trainer", "reference"):
        size = vars(vars(config)[section])["tensor_parallel"]
        yield (
            size > 1 and REF_TOP_IDS in config.algorithm.spec.columns,
            f"{section}.tensor_parallel",
            f"{config.algorithm.name} compares words that were not sampled, which ranks that share"
            " the vocabulary do not score. Set 1, or algorithm.name=distill",
        )
    yield (
        config.reference.decay and config.trainer.lora_rank,
        "reference.decay",
        "averaging LoRA factors does not average the models; with"
        f" trainer.lora_rank={config.trainer.lora_rank} reference.decay must be 0",
    )
    without_model = {*config.dataflow.trained_roles, GENERATE_CALL.role, *REWARD_ROLES}
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


def _iter_replay_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield the rules on training that replays choices of the generator."""
    yield (
        bool(config.generator.sampling_mask) and config.trainer.tensor_parallel > 1,
        "generator.sampling_mask",
        f"trainer.tensor_parallel={config.trainer.tensor_parallel} divides the words among ranks,"
        " which cannot be renormalized; set it to 1 or leave the mask out",
    )


def _iter_episode_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield the rules on limits of episodes, and on algorithms that have none."""
    yield (
        config.evaluation.unique,
        "evaluation.unique",
        "has no meaning with environments, whose rows may differ in more than their prompt",
    )
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


def _iter_row_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield the rules on algorithms that train on completions in the data."""
    name = config.algorithm.name
    yield (
        config.data.sampling != "uniform",
        "data.sampling",
        f"has no effect: {name} has no pass rates. Set data.sampling=uniform",
    )
    yield (
        bool(config.data.replay),
        "data.replay",
        f"has no effect: {name} trains on rows of the data. Remove it",
    )
    settings, is_pairs = config.algorithm_settings, config.algorithm.spec.trains_on == PAIRS
    for key, is_set, allowed in (
        ("kl_coef", bool(settings.kl_coef), not is_pairs),
        ("ptx_coef", bool(config.algorithm.ptx_coef), not is_pairs),
        ("entropy_coef", bool(settings.entropy_coef), not is_pairs),
        ("kl_in", bool(settings.kl_coef) and settings.kl_in == "reward", False),
        ("whiten_advantages", settings.whiten_advantages, False),
    ):
        yield is_set and not allowed, f"algorithm.{key}", f"has no meaning for {name}; leave it out"


def _iter_group_replay_conflicts(config: RunConfig, replay: ReplayConfig) -> Iterator[Conflict]:
    """Yield the rules on the replay of trained groups, which an older policy sampled."""
    algorithm, correction = config.algorithm, config.algorithm.correction
    is_truncated = correction.weights != NO_CORRECTION and correction.weight_high is not None
    settings, has_critic = config.algorithm_settings, CRITIC in config.dataflow.trained_roles
    by_step = settings.advantage_scale == "batch" or algorithm.spec.scope == "step"
    staleness = config.pipeline.max_staleness
    rules = {
        "replayed tokens need truncated importance weights. Set algorithm.correction.proximal"
        "=trainer, algorithm.correction.weights=token and a weight_high": not is_truncated,
        "the advantages compare all groups of a step, replays with new ones. Choose another"
        " algorithm, advantage_scale or whiten_advantages": by_step or settings.whiten_advantages,
        "values and moving references of replayed groups are out of date. Choose an algorithm"
        " without critic, and reference.every=0": has_critic or bool(config.reference.every),
        f"max_age must be above pipeline.max_staleness={staleness}": replay.max_age <= staleness,
        "a resume needs the kept groups. Set queue.journal.enabled=true": (
            not config.queue.journal.enabled
        ),
    }
    yield from ((holds, "data.replay", rule) for rule, holds in rules.items())


def _iter_score_conflicts(config: RunConfig) -> Iterator[Conflict]:
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


def _iter_pool_conflicts(config: RunConfig) -> Iterator[Conflict]:
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


def find_colocation_conflict(config: RunConfig) -> str:
    """Return why generators cannot run inside the trainer's ranks, naming the setting, or ""."""
    return find_conflict(config, _iter_colocation_conflicts(config))


def find_conflict_at_any_size(config: RunConfig) -> str:
    """Return a setting that forbids a colocated run of any size, with the reason, or ""."""
    return find_conflict(config, _iter_sizeless_conflicts(config))


def _iter_colocation_conflicts(config: RunConfig) -> Iterator[Conflict]:
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


def _iter_sizeless_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield the rules of colocated runs that hold for any number of ranks."""
    weights = config.weights
    yield (
        config.reads_rows,
        "placement.mode",
        f"{config.algorithm.name} has no generator to colocate; set placement.mode=auto",
    )
    for applies, key, reason in (
        (weights.publish_every > 1, "weights.publish_every", "the weights change at every step"),
        (weights.transport != AUTO, "weights.transport", "weights need no transport"),
        (
            config.critic.shared_coef is not None,
            "critic.shared_coef",
            "the generator cannot share a policy that has a value head",
        ),
        (
            config.generator.threads != (config.trainer.threads or 1),
            "generator.threads",
            f"the generator uses the trainer.threads={config.trainer.threads} of its process",
        ),
    ):
        yield applies, key, f"in a colocated run {reason}"


def check_algorithm(config: RunConfig) -> None:
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


def count_trained_steps(config: RunConfig, role: str) -> int:
    """Return the number of training steps that change a role's model.

    Steps of the critic warm-up leave the policy frozen and do not count for the policy.
    """
    has_warm_up = role == POLICY and len(config.dataflow.trained_roles) > 1
    return max(1, config.run.steps - (config.critic.warmup_alone if has_warm_up else 0))


# Reading


def load_config(
    path: Path, overrides: Sequence[str] = (), *, skips_dry_run: bool = False
) -> RunConfig:
    """Read a YAML file or run directory and key=value overrides into a checked RunConfig.

    skips_dry_run: skip the algorithm's dry run, because it passed when the run started. Raises a
    one-line ConfigError with key, value and rule, or with the nearest valid key.
    """
    settings = _read_config_file(path)
    return build_config(RunConfig, settings, overrides, str(path), skips_dry_run=skips_dry_run)


def load_sections(path: Path | None, overrides: Sequence[str] = ()) -> ConfigSections:
    """Read the sections of a YAML file or run directory, which may leave out what a run needs.

    path: None: the defaults. Raises a one-line ConfigError as `load_config` does, without the
    checks across sections.
    """
    settings = OmegaConf.create({}) if path is None else _read_config_file(path)
    return build_config(ConfigSections, settings, overrides, str(path), skips_dry_run=True)


def build_config(
    kind: type[ConfigT],
    settings: DictConfig,
    overrides: Sequence[str],
    source: str,
    *,
    skips_dry_run: bool,
) -> ConfigT:
    """Build a RunConfig, or sections without checks across, from settings in YAML's structure.

    overrides: key=value each. source: file that gave the settings, for errors. skips_dry_run: skip
    the algorithm's dry run.
    """
    for override in overrides:
        _apply_override(settings, override)
    with _name_source(source, overrides):
        config = parse_settings(kind, settings)
        if isinstance(config, RunConfig) and not skips_dry_run:
            check_algorithm(config)
    _make_paths_absolute(config)
    return config


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return a config with changed settings, new values by dotted key.

    The algorithm must stay the same, because its dry run is not repeated. Raises ConfigError if the
    result is inconsistent.
    """
    changed = OmegaConf.create(dataclasses.asdict(config))
    for key, value in settings.items():
        OmegaConf.update(changed, key, value, merge=False, force_add=True)
    return parse_settings(RunConfig, changed)


@contextlib.contextmanager
def _name_source(source: str, overrides: Sequence[str]) -> Iterator[None]:
    """Start ConfigErrors of the block with the source, unless an override gave the key at fault."""
    try:
        yield
    except ConfigError as error:
        keys = "|".join(re.escape(override.partition("=")[0]) for override in overrides)
        is_overridden = re.match(rf"(?:{keys})(?!\w)", str(error)) if keys else None
        raise error if is_overridden else ConfigError(f"{source}: {error}") from None


def parse_settings(kind: type[ConfigT], settings: DictConfig) -> ConfigT:
    """Convert settings in YAML's structure to a RunConfig, or to sections without checks across.

    Raises a one-line ConfigError for keys, types and values.
    """
    raw = drop_removed_settings(OmegaConf.to_container(settings))
    config = merge_settings(kind, prepare_settings(raw, kind, "", _suggest_key), location="")
    assert isinstance(config, kind)
    return config


def _make_critic_trainer(trainer: TrainerConfig, changes: Mapping[str, Any]) -> TrainerConfig:
    """Return the settings of `trainer` with the changes of critic.trainer, checked."""
    section = CriticTrainerConfig.section
    raw = prepare_settings(dict(changes), CriticTrainerConfig, section)
    with extend_errors(after="; it inherits unset keys from trainer"):
        inherited = {**vars(trainer), **raw}
        merged = merge_settings(CriticTrainerConfig, inherited, location=f"{section}.")
    assert isinstance(merged, TrainerConfig)
    return merged


def _make_paths_absolute(config: ConfigSections) -> None:
    """Make all paths in the config absolute, in place.

    Actors and later resumes may run in another working directory.
    """
    for key in ("train", "eval", "pretrain"):
        setattr(config.data, key, make_paths_absolute(vars(config.data)[key]))
    for _, settings in iter_path_sections(config):
        if path := settings.get("path"):
            settings["path"] = str(Path(str(path)).absolute())
    if config.reference.path:
        config.reference.path = find_model_dir(config.reference.path)
    for spec in config.environment.specs.values():
        spec.make_paths_absolute()


def iter_path_sections(config: ConfigSections) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sections and list entries whose key `path` names an input, by their key."""
    for name in ("model", "critic", "reference", "algorithm", "filter"):
        yield name, vars(vars(config)[name])
    for name, entries in (("rewards", config.rewards), ("costs", config.costs)):
        yield from ((f"{name}[{i}]", entry.options) for i, entry in enumerate(entries))


def dump_config(config: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _read_config_file(path: Path) -> DictConfig:
    """Read a YAML file as an OmegaConf mapping, which supports ${...} interpolation.

    path: a run directory stands for its config. Raises ConfigError for an unreadable or malformed
    file.
    """
    if os.path.isdir(path):
        path = check_run_dir(path)
    with wrap_file_errors(f"config {path}"):
        loaded = read_small_yaml(path)
    if not isinstance(loaded, dict | None):
        raise ConfigError(f"config {path}: {loaded!r:.40}: must be a mapping of settings")
    try:
        return OmegaConf.create(loaded or {})
    except OmegaConfBaseException as error:
        reason = get_first_line(error.msg or error)
        raise ConfigError(f"config {path}: {error.full_key}: {reason}") from None
    except RecursionError:
        raise ConfigError(f"config {path}: nested too deeply") from None


YAML_VALUE_ERRORS = (TypeError, ValueError, LookupError, AttributeError)
"""Exceptions that PyYAML's constructors raise for values that contradict their tag (`!!int x`)."""


def _apply_override(settings: DictConfig, override: str) -> None:
    """Apply a key=value override to settings in place; rewards[0].weight=2 sets a list entry."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r}: write an override as key=value")
    try:
        # Not resolved yet: an interpolation refers to the whole config.
        raw: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
    except RecursionError:
        raise ConfigError(f"{override!r:.80}: nested too deeply") from None
    except (YAMLError, OmegaConfBaseException, *YAML_VALUE_ERRORS) as error:
        problem = error.problem if isinstance(error, MarkedYAMLError) else error
        reason = " ".join(str(problem).partition("full_key:")[0].split())
        raise ConfigError(
            f"{override!r:.200}: the value is not YAML ({reason}); quote a text with signs"
        ) from None
    try:
        OmegaConf.update(settings, key, raw["value"], merge=False, force_add=True)
    except (TypeError, ValueError, IndexError):
        raise ConfigError(
            f"{override!r:.200}: a list has no such entry; set a whole list as in x=[...]"
        ) from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{override!r:.200}: {get_first_line(error)}") from None
