"""A run's configuration: composes each room's config, reads YAML and key=value overrides."""

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from streamrl.algorithms.algorithm import AlgorithmSettings
from streamrl.algorithms.columns import list_required_columns
from streamrl.algorithms.config import AlgorithmConfig
from streamrl.buffer.admission.oversampling import MAX_FACTOR as MOST_OVERSAMPLED
from streamrl.buffer.admission.staleness_credits import check_capacity
from streamrl.buffer.config import QueueConfig
from streamrl.config.cross_checks import (
    check_algorithm,
    check_consistency,
    find_colocation_conflict,
)
from streamrl.data import DataConfig
from streamrl.data.files import FILE_KEYS as FILE_KEYS
from streamrl.data.files import make_paths_absolute
from streamrl.dataflow import CRITIC, POLICY, Dataflow, build_dataflow
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.reference_config import ReferenceConfig
from streamrl.engines.trainer_config import CriticConfig, TrainerConfig
from streamrl.errors import ConfigError
from streamrl.evaluation import MAX_SEED, EvaluationConfig
from streamrl.files.bounded_read import read_small_yaml
from streamrl.files.typed_settings import (
    describe_read_error,
    fill_empty_text,
    format_as_list,
    rename_error_section,
)
from streamrl.placement import PlacementConfig
from streamrl.rewards import (
    COSTS,
    REWARDS,
    RewardConfig,
    SandboxConfig,
    ScorerConfig,
    check_options,
)
from streamrl.rewards.group_filter import FilterConfig
from streamrl.rewards.interface.config import fold_options
from streamrl.run_dir.checkpoint import CheckpointConfig
from streamrl.stream.run_state import PipelineConfig
from streamrl.telemetry import TelemetryConfig
from streamrl.weights import WeightsConfig

MAX_NAME_BYTES = 200


@dataclass
class RunSettings:
    """The run itself.

    name: names the run directory, dir/name.
    dir: where run directories are.
    seed: of the prompts' order and of every rollout.
    steps: optimizer steps in all, those before a resume included.
    overwrite: replace a run directory of that name that exists.
    max_restarts: times a generator or a scorer that died is started again, each.
    silent_s: a generator, scorer or shard whose process, or engine, answers nothing for this long
        is ended, and started again like one that died, s; others are named; longer than any load.
    debug: check the ledger uid by uid at every change, not only its sums at every step.
    """

    name: str = "run"
    dir: str = "runs"
    seed: int = 0
    steps: int = 100
    overwrite: bool = False
    max_restarts: int = 3
    silent_s: float = 120.0
    debug: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"run.steps={self.steps}: must be at least 1")
        if self.max_restarts < 0:
            raise ConfigError(f"run.max_restarts={self.max_restarts}: must be 0 or more")
        if self.silent_s < 1:
            raise ConfigError(f"run.silent_s={self.silent_s:g}: must be at least 1 s")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"run.seed={self.seed}: must be from 0 to {MAX_SEED}")
        is_plain = self.name not in ("", ".", "..") and "/" not in self.name
        if not is_plain or not self.name.isprintable() or len(self.name.encode()) > MAX_NAME_BYTES:
            raise ConfigError(
                f"run.name={self.name!r}: must be a plain folder name of at most"
                f" {MAX_NAME_BYTES} bytes"
            )


@dataclass
class ModelConfig:
    """The policy's starting point.

    path: a Hugging Face model directory.
    max_length: most tokens of prompt and completion; null takes the model's own limit.
    trust_remote_code: run the Python files that the directory, or that of the critic, brings for
        its model or tokenizer (auto_map); without it such a directory is refused.
    """

    path: str = ""
    max_length: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length <= 1:
            raise ConfigError(f"model.max_length={self.max_length}: must be at least 2 tokens")


@dataclass
class RunConfig:
    """All settings of a run, a room each."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    rewards: list[RewardConfig] = field(default_factory=list)
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

    def __post_init__(self) -> None:
        _check_values(config_to_dict(self), "")
        if not self.model.path:
            raise ConfigError("model.path: missing; it names a Hugging Face model directory")
        if not self.data.train:
            raise ConfigError("data.train: missing; it names a file of prompts")
        if not self.rewards:
            raise ConfigError("rewards: empty; a run needs at least one, e.g. [{kind: exact}]")
        check_options(self.rewards, REWARDS)
        check_options(self.costs, COSTS)
        check_consistency(self)
        check_capacity(
            self.capacity_groups,
            depth=self.pipeline.max_steps_ahead,
            groups_per_step=self.pipeline.groups_per_step,
        )

    @property
    def colocation_conflict(self) -> str:
        """Why trainer and generators cannot share processes, if so: setting, value and reason."""
        return find_colocation_conflict(self)

    @property
    def needs_resharding(self) -> bool:
        """Whether ranks lay each version down in the generators of their processes, all together.

        A rank may train another part of the policy than its generator serves.
        """
        splits = self.generator.tensor_parallel > 1
        return self.placement.is_hybrid and (self.trainer.has_sharded_params or splits)

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        return Path(self.run.dir) / self.run.name

    @property
    def algorithm_settings(self) -> AlgorithmSettings:
        """The algorithm's settings, with nothing left open."""
        return self.algorithm.to_settings(
            max_length=self.generator.max_new_tokens,
            reward_weights={reward.component_name: reward.weight for reward in self.rewards},
        )

    @property
    def dataflow(self) -> Dataflow:
        """The model calls of the algorithm, and what flows between them."""
        columns = list_required_columns(self.algorithm.spec, self.algorithm_settings)
        return build_dataflow(
            columns,
            shares_critic=self.critic.shared_coef is not None,
            moves_reference=bool(self.reference.every),
            has_filter=self.filter.is_enabled,
        )

    def get_trainer_config(self, role: str) -> TrainerConfig:
        """How the model of a role is trained. Raises ConfigError for a wrong `critic.trainer`."""
        if role == POLICY:
            return self.trainer
        return _overlay_settings(self.trainer, self.critic.trainer, section="critic.trainer")

    def get_model_path(self, role: str) -> str:
        """The directory the model of a role starts from."""
        return self.model.path if role == POLICY else self.critic.path or self.model.path

    @property
    def trusted_models(self) -> list[str]:
        """The model directories whose own code may be run."""
        return (
            [self.model.path, self.get_model_path(CRITIC)] if self.model.trust_remote_code else []
        )

    @property
    def capacity_groups(self) -> int:
        """Groups the queue may hold; by default what the depth keeps in flight."""
        places = (self.pipeline.max_steps_ahead + 1) * self.pipeline.groups_per_step
        needed = math.ceil(places * (self.filter.oversample_factor or MOST_OVERSAMPLED))
        return needed if self.queue.capacity_groups is None else self.queue.capacity_groups


def load_config(
    path: Path, overrides: Sequence[str] = (), *, is_rehearsed: bool = False
) -> RunConfig:
    """Read a YAML file and key=value overrides into a checked RunConfig.

    `is_rehearsed`: the algorithm was tried on a made-up step as the run began, and is not again.

    Raises ConfigError: one line with the key, the value and the rule, or the nearest right key.
    """
    return build_config(
        _read_config_file(path), overrides, place=str(path), is_rehearsed=is_rehearsed
    )


def build_config(
    settings: DictConfig,
    overrides: Sequence[str] = (),
    *,
    place: str,
    is_rehearsed: bool = False,
) -> RunConfig:
    """The same of settings that are read already; `place` is where they come from."""
    for override in overrides:
        _apply_override(settings, override)
    config = parse_settings(settings, place=place)
    if not is_rehearsed:
        check_algorithm(config)
    _make_paths_absolute(config)
    return config


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The config of the same algorithm with some settings changed, by their dotted keys.

    Raises ConfigError if they disagree with others.
    """
    changed = _replace_settings(config, settings)
    assert isinstance(changed, RunConfig)
    return changed


def _replace_settings(part: Any, settings: Mapping[str, Any]) -> Any:
    """A dataclass, or a mapping of overrides, with some of its values changed at once."""
    values: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        name, dot, rest = key.partition(".")
        if dot:
            inside.setdefault(name, {})[rest] = value
        else:
            values[name] = value
    if isinstance(part, Mapping):
        return {**part, **values}
    values |= {name: _replace_settings(vars(part)[name], own) for name, own in inside.items()}
    return dataclasses.replace(part, **values)


def parse_settings(settings: DictConfig, *, place: str) -> RunConfig:
    """Check loose settings against the structure of RunConfig; `place` is where they come from."""
    loose = fill_empty_text(_fold_kind_options(OmegaConf.to_container(settings)), RunConfig)
    for key, value, inside in _iter_settings(loose, RunConfig, ""):
        _check_key(key, value, inside, place)
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), loose))
        OmegaConf.structured(config)  # looks into lists, which a merge does not
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{place}: {_find_refused_key(error, loose)}: {reason}") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{place}: {error}") from None
    assert isinstance(config, RunConfig)
    return config


def _find_refused_key(error: OmegaConfBaseException, loose: Mapping[str, Any]) -> str:
    """Which setting has the value that is refused.

    Of what is in a list OmegaConf may know only where it is in its entry, or the entry's number.
    """
    inside = str(error.full_key or "")
    if error.object_type is not RewardConfig and inside and not inside.isdigit():
        return inside
    kind = OmegaConf.structured(RunConfig)
    for path, number, entry in _iter_list_entries(loose, ()):
        alone: Any = [entry]
        for name in reversed(path):
            alone = {name: alone}
        try:
            OmegaConf.merge(kind, alone)
        except OmegaConfBaseException:
            place = f"{'.'.join(path)}[{number}]"
            return f"{place}.{inside}" if inside and not inside.isdigit() else place
    return inside or "config"


def _iter_list_entries(
    settings: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], int, Any]]:
    """What is in a list that is in none itself: the names that lead there, and its number."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _iter_list_entries(value, (*path, name))
        elif isinstance(value, list):
            yield from (((*path, name), i, entry) for i, entry in enumerate(value))


def _fold_kind_options(loose: Any) -> Any:
    """The settings, with the options of rewards, costs and filter under their key."""
    own = {key: set(get_type_hints(kind)) for key, kind in _OPTION_SECTIONS.items()}
    found = dict(loose)
    for key in found.keys() & own.keys():
        value = found[key]
        if isinstance(value, list):
            found[key] = [
                fold_options(entry, own[key]) if isinstance(entry, dict) else entry
                for entry in value
            ]
        elif isinstance(value, dict):
            found[key] = fold_options(value, own[key])
    return found


#: What has options that depend on its kind.
_OPTION_SECTIONS = {"rewards": RewardConfig, "costs": RewardConfig, "filter": FilterConfig}


def _overlay_settings(
    config: TrainerConfig, changes: Mapping[str, Any], *, section: str
) -> TrainerConfig:
    """The settings with some changed; a wrong one is named as part of `section`."""
    if not changes:
        return config
    for name, value in changes.items():
        if name not in vars(config):
            near = difflib.get_close_matches(name, vars(config), n=1, cutoff=0.0)[0]
            raise ConfigError(f"{section}.{name}={value!r}: unknown; the nearest key is {near}")
    try:
        given = fill_empty_text(dict(changes), TrainerConfig)
        merged = OmegaConf.merge(OmegaConf.structured(config), given)
        overlaid = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{section}.{error.full_key}: {reason}") from None
    except ConfigError as error:
        raise rename_error_section(error, changes, section=section) from None
    assert isinstance(overlaid, TrainerConfig)
    _check_values(vars(overlaid), section)
    return overlaid


def _check_values(settings: Any, place: str) -> None:
    """Raise ConfigError for a number that is none, or text that no file name may hold."""
    for key, value in _iter_leaves(settings, place):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value}: must be a finite number")
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{key}={value!r}: must not hold a zero byte")


def _iter_leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every setting that is not made of others, with its full key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            # The options of a reward or a filter are written beside its other keys.
            place = key if name == "options" else f"{key}.{name}"
            yield from _iter_leaves(inner, place.removeprefix("."))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _iter_leaves(inner, f"{key}[{i}]")
    else:
        yield key, value


def _make_paths_absolute(config: RunConfig) -> None:
    """Actors and a later resume may be in another working directory."""
    config.model.path = str(Path(config.model.path).absolute())
    if config.critic.path:
        config.critic.path = str(Path(config.critic.path).absolute())
    for key in ("train", "eval", "pretrain"):
        setattr(config.data, key, make_paths_absolute(vars(config.data)[key]))
    owners = [*config.rewards, *config.costs]
    for options in (*(owner.options for owner in owners), config.filter.options):
        if path := options.get("path"):
            options["path"] = str(Path(str(path)).absolute())
    if config.scorer.combine:
        config.scorer.combine = str(Path(config.scorer.combine).absolute())
    if config.algorithm.path:
        config.algorithm.path = str(Path(config.algorithm.path).absolute())


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain nested dicts and lists."""
    return dataclasses.asdict(config)


def _read_config_file(path: Path) -> DictConfig:
    """The settings of a file, in which ${...} may stand for others."""
    try:
        loaded = read_small_yaml(path)
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"config {path}: {describe_read_error(error)}") from None
    if not isinstance(loaded, dict | None):
        raise ConfigError(f"config {path}: {loaded!r:.40}: must be a mapping of settings")
    try:
        return OmegaConf.create(loaded or {})
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"config {path}: {error.full_key}: {reason}") from None
    except RecursionError:
        raise ConfigError(f"config {path}: nested too deeply") from None


YAML_VALUE_ERRORS = (TypeError, ValueError, LookupError, AttributeError)
"""What a value comes to that is not what its tag says, as in `!!int x`."""


def _apply_override(settings: DictConfig, override: str) -> None:
    """Set one key=value; an entry of a list is named by its index, as in rewards[0].weight=2."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r}: an override is written key=value")
    try:
        parsed = OmegaConf.from_dotlist([f"value={value}"])["value"]
        OmegaConf.update(settings, key, parsed, merge=False, force_add=True)
    except RecursionError:
        raise ConfigError(f"{override!r:.80}: nested too deeply") from None
    except (YAMLError, OmegaConfBaseException, *YAML_VALUE_ERRORS) as error:
        raise ConfigError(f"{override!r:.200}: {' '.join(str(error).split())}") from None


def _iter_settings(loose: Any, kind: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Every setting given, as (full key, value, dataclass that should have it)."""
    if get_origin(kind) is list and isinstance(loose, list):
        for i, item in enumerate(loose):
            yield from _iter_settings(item, get_args(kind)[0], f"{prefix.removesuffix('.')}[{i}].")
    elif is_dataclass(kind) and isinstance(loose, dict):
        hints = get_type_hints(kind)
        for name, value in loose.items():
            yield f"{prefix}{name}", value, kind
            yield from _iter_settings(value, hints.get(str(name)), f"{prefix}{name}.")


#: Settings of other systems that are left out on purpose, and why.
UNSUPPORTED_SETTINGS = dict.fromkeys(
    ("generator.top_p", "generator.top_k", "generator.min_p"),
    "is refused in training: the tokens would come from another distribution than the one whose"
    " log-probabilities are trained; evaluation.top_p and evaluation.top_k exist",
)


def _check_key(key: str, value: Any, inside: Any, place: str) -> None:
    hints = get_type_hints(inside)
    parent, _, name = key.rpartition(".")
    if inside is DataConfig and name in FILE_KEYS and name not in hints:
        hint = f"it belongs to a file, as in data.train={{path: ..., {name}: ...}}"
        raise ConfigError(f"{place}: unknown key {key}={value!r}; {hint}")
    if key in UNSUPPORTED_SETTINGS:
        raise ConfigError(f"{place}: {key}={value!r}: {UNSUPPORTED_SETTINGS[key]}")
    if name not in hints:
        near = difflib.get_close_matches(key, list(_iter_keys(RunConfig)), n=1, cutoff=0.0)
        local = difflib.get_close_matches(name, hints, n=1)
        right = f"{parent}.{local[0]}".removeprefix(".") if local else near[0]
        raise ConfigError(f"{place}: unknown key {key}={value!r}; the nearest key is {right}")
    if is_dataclass(hints[name]) and not isinstance(value, dict):
        raise ConfigError(f"{place}: {key}={value!r}: must be a mapping of settings")
    if get_origin(hints[name]) is list and not isinstance(value, list):
        raise ConfigError(
            f"{place}: {key}={value!r}: must be a list, as in {format_as_list(key, value)}"
        )
    if isinstance(value, bool) and str in (hints[name], *get_args(hints[name])):
        also = "on, yes and true" if value else "off, no and false"
        raise ConfigError(
            f"{place}: {key}={value}: must be text; YAML reads {also} so unless quoted"
        )


def _iter_keys(kind: Any, prefix: str = "") -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        item = get_args(hint)[0] if get_origin(hint) is list else hint
        yield f"{prefix}{name}"
        if is_dataclass(item):
            yield from _iter_keys(item, f"{prefix}{name}.")
