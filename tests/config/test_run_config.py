"""YAML and overrides become a checked RunConfig, or a one-line error."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from math import inf
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import yaml
from omegaconf import OmegaConf

from streamrl.config.role_counts import count_actors
from streamrl.config.run_config import RunConfig, dump_config, load_config
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import (
    Bounds,
    OneOf,
    format_value,
    get_fields,
    prepare_settings,
)
from streamrl.messages import EPISODE_COLUMNS
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.registry import REWARD_KINDS

MINIMAL = """
model: {path: some/model}
data: {train: some/rows.jsonl}
rewards: [{kind: exact}]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize(
    ("text", "override", "error"),
    [
        ("run: {steps: 1.5}", "run.name=a", "{recipe}: run.steps=1.5: must"),
        ("run: {steps: 3}", "run.steps=1.5", "run.steps=1.5: must"),
        ("trainer: {lr: -1}", "run.name=a", "{recipe}: trainer.lr=-1"),
        ("trainer: {lr: 1}", "trainer={lr: -1}", "trainer.lr=-1"),
        ("trainer: {lr_warm: 1}", "trainer.lr=1", "{recipe}: trainer.lr_warm=1: unknown"),
        ("model: {}", "run.name=a", "{recipe}: model.path: missing"),
    ],
)
def test_an_error_names_the_file_unless_an_override_gave_the_value(
    recipe: Path, text: str, override: str, error: str
):
    recipe.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(recipe, [override])
    assert str(raised.value).startswith(error.format(recipe=recipe))


@pytest.mark.parametrize(
    ("overrides", "capacity"),
    [
        ([], 2 * 8),  # max_staleness is 1
        (["pipeline.max_staleness=3"], 32),
        (["pipeline.max_staleness=3", "pipeline.depth=1"], 16),
        (["pipeline.max_staleness=3", "pipeline.depth=5", "pipeline.on_stale=drop"], 48),
        (["pipeline.max_staleness=0", "filter={kind: equal_rewards, oversample: 1}"], 8),
        (["pipeline.max_staleness=0", "filter={kind: equal_rewards, oversample: 2.5}"], 20),
        (["pipeline.max_staleness=0", "filter={kind: equal_rewards, oversample: auto}"], 256),
    ],
)
def test_depth_and_oversampling_set_the_groups_in_flight(recipe, overrides, capacity):
    config = load_config(recipe, ["pipeline.groups_per_step=8", *overrides])
    assert config.capacity_groups == capacity


def test_a_list_entry_can_be_overridden_by_index(recipe: Path):
    assert load_config(recipe, ["rewards[0].weight=2"]).rewards[0].weight == 2.0
    for key in ("[5].weight", ".7.weight", ".x.weight", "[5]", ".name"):
        with pytest.raises(ConfigError, match=r"^'rewards.*': a list has no such entry; set a wh"):
            load_config(recipe, [f"rewards{key}=2"])


@pytest.mark.parametrize(
    ("override", "key", "entry"),
    [
        ("generator.stop=</answer>", "generator.stop", "</answer>"),
        ("generator.stop='it''s, ü: [\"'", "generator.stop", "it's, ü: [\""),
        ("rewards={kind: exact}", "rewards", "exact"),
    ],
)
def test_a_scalar_instead_of_a_list_suggests_the_list(
    recipe: Path, override: str, key: str, entry: object
):
    with pytest.raises(ConfigError, match="must be a list, as in ") as caught:
        load_config(recipe, [override])
    (example,) = shlex.split(str(caught.value).partition(", as in ")[2])
    config = asdict(load_config(recipe, [example]))
    (item,) = OmegaConf.select(OmegaConf.create(config), key)
    assert (item["kind"] if key == "rewards" else item) == entry


def test_an_empty_text_setting_is_an_empty_string(recipe: Path):
    recipe.write_text(MINIMAL + "placement: {address: }\n")
    empty = ["critic.path=", "data.eval=", "telemetry.wandb.mode=disabled"]
    config = load_config(recipe, [*empty, "algorithm.path=null", "rewards[0].name="])
    assert config.placement.address == config.critic.path == ""
    assert config.algorithm.path == config.rewards[0].name == ""
    assert config.data.eval_files == ()
    # A number may be null only if null has a meaning.
    assert load_config(recipe, ["model.max_length="]).model.max_length is None
    with pytest.raises(ConfigError, match=r"run\.steps"):
        load_config(recipe, ["run.steps="])
    with pytest.raises(ConfigError, match=r"run\.name='': must be a plain folder name"):
        load_config(recipe, ["run.name="])


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.lr=3e-4", "model.max_length=64"],
        ["rewards=[{kind: exact}]", "rewards[0].pattern=y"],
        ["environment.named.b={path: b.py, options: {words: [x]}}"],
    ],
)
def test_a_dumped_config_loads_equal(recipe: Path, tmp_path: Path, overrides: list[str]):
    config = load_config(recipe, overrides)
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "resolved.yaml") == config


def test_reward_options_may_stand_beside_the_fixed_keys(recipe: Path):
    (flat,) = load_config(recipe, ["rewards=[{kind: exact, weight: 2, pattern: x}]"]).rewards
    nested = "rewards=[{kind: exact, weight: 2, options: {pattern: x}}]"
    (deep,) = load_config(recipe, [nested]).rewards
    assert flat == deep == RewardConfig("exact", weight=2.0, options={"pattern": "x"})
    overridden = load_config(recipe, ["rewards=[{kind: exact}]", "rewards[0].pattern=y"])
    assert overridden.rewards[0].options == {"pattern": "y"}


def test_paths_become_absolute(recipe: Path):
    config = load_config(recipe)
    assert Path(config.model.path).is_absolute()
    assert Path(config.data.train).is_absolute()
    functions = ["filter={kind: function, path: keep.py, function: keep}"]
    assert Path(load_config(recipe, functions).filter.path).is_absolute()


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("off", False), ("offload", "offload")]
)
def test_a_setting_may_be_a_boolean_or_text(recipe: Path, text: str, value: bool | str):
    override = f"trainer.gradient_checkpointing={text}"
    assert load_config(recipe, [override]).trainer.gradient_checkpointing == value


def iter_typed_keys(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield key and type of every setting; settings of list entries are those of entry 0."""
    for name, hint in get_fields(kind).items():
        yield f"{prefix}{name}", hint
        entry = next(filter(is_dataclass, get_args(hint)), hint)
        if is_dataclass(entry) and get_origin(hint) is not dict:
            index = "[0]" if get_origin(hint) is list else ""
            yield from iter_typed_keys(entry, f"{prefix}{name}{index}.")


def test_a_value_of_a_wrong_type_is_one_line_with_key_and_value(recipe: Path):
    """Set every key to values of other types, which no library may explain in its own words."""
    recipe.write_text(f"{MINIMAL}costs: [{{}}]\nenvironment: {{tools: [{{}}]}}\n")
    checked = 0
    for key, hint in iter_typed_keys(RunConfig):
        kinds = {get_origin(hint) or hint, *get_args(hint)}
        value = "7" if is_dataclass(hint) or kinds & {list, dict} else "{a: b}"
        value = "hot" if kinds <= {int, float, bool, NoneType, UnionType} else value
        if hint is Any:
            continue
        with pytest.raises(ConfigError) as caught:
            load_config(recipe, [f"{key}={value}"])
        message = str(caught.value)
        shown = "'hot'" if value == "hot" else format_value(yaml.safe_load(value))
        assert f"{key}={shown}: must be " in message, message
        assert "\n" not in message, message
        checked += 1
    assert checked > 170


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.trust_remote_code=1", "policy=.*: unknown; the keys are run, model, "),
        (
            "trainer.max_staleness=1",
            "max_staleness=1: unknown; the nearest key is pipeline.max_staleness",
        ),
        ("run.name=off", "run.name=false: must be text; YAML reads unquoted off, no and false as"),
        ("trainer.lrr=1", "trainer.lrr=1: unknown; the nearest key is trainer.lr"),
        (
            "data.filter=a.py:b",
            "data.filter='a.py:b': unknown; set it per file, as in data.train={path",
        ),
        ("rewards=[{kind: exact, kwargs: {a: [.inf]}}]", r"kwargs\.a\[0\]=inf: must be a finite"),
        ("pipeline.stall_s=${oc.decode:'inf'}", "pipeline.stall_s=inf: must be a finite number"),
        ("rewards=[{kind: exact, wieght: 2}]", r"rewards\[0\].wieght=2: .*nearest key is weight"),
        ("placement.pools=[{policy: 1}, 3]", r"placement.pools\[1\]=3: must be a mapping"),
        ("placement.pools=[{policy: x}]", r"placement.pools\[0\].policy='x': must be"),
        ("run.steps=[1", r"'run.steps=\[1': the value is not YAML .*did not find expected"),
        ("run.seed=${nope}", "run.seed: Interpolation key 'nope' not found"),
        ("rewards.0.kind=foo", r"rewards\[0\].kind=foo: no such kind; the kinds are exact, "),
        ("filter.oversample=2", "filter.oversample=2: has no effect with filter.kind=none"),
        ("filter={kind: equal_rewards, oversample: 0.5}", "filter.oversample=0.5: must be a num"),
        (
            "pipeline.depth=2",
            r"pipeline.depth=2: \(2 \+ 1\) \* 32 groups .*max_staleness 1 \+ 1\).*on_stale=drop",
        ),
        (
            "trainer={backend: torch, offload_optimizer: true}",
            "offload_optimizer=true: needs backend=deepspeed$",
        ),
        (
            "trainer={offload_optimizer: true, zero_stage: 0}",
            "offload_optimizer=true: needs a zero_stage above 0$",
        ),
        ("algorithm.router_replay=r2", "router_replay=r2: has no effect: a step has one update"),
        ("generator.top_p=0.9", r"generator.top_p=0.9: .*set generator.sampling_mask={top_k: 50"),
        ("generator.sampling_mask={top_p: 0.9}", r"sampling_mask={.*}: needs a whole top_k, which"),
        ("generator.sampling_mask={top_k: 2.5}", r"sampling_mask={.*}: needs a whole top_k, which"),
        ("generator.sampling_mask={top_k: 300}", "top_k: must be at least 1 and at most 256"),
        ("generator.sampling_mask={topk: 3}", "topk: must be one of top_k, top_p, min_p"),
        ("generator.stop_token_ids=[3,-1]", r"stop_token_ids\[1\]=-1: must be at least 0"),
        (
            "trainer={world_size: '${trainer.warmup_steps}'}",
            "trainer.world_size=0: must be at least 1",
        ),
        (
            "trainer={offload_optimizer: true, zero_stage: 2}",
            "zero_stage=2, dtype=auto DeepSpeed would sum gradients in bfloat16",
        ),
        ("trainer.gradient_checkpointing=1", "gradient_checkpointing=1: must be true or false or"),
        ("run.silent_s=" + "9" * 400, "run.silent_s=9+: must be a number"),
        ("run={null: 1}", r"not YAML \(Incompatible key type 'NoneType'\); quote"),
        ("model.path=''", "model.path: missing"),
        ("rewards=[]", "rewards: empty"),
        ("algorithm.mini_batches=3", "mini_batches=3: must divide pipeline.groups_per_step=32"),
        ("algorithm.overlong_buffer=257", "overlong_buffer=257: must be at most generator.max_new"),
        ("critic.trainer.lrr=1", "critic.trainer.lrr=1: unknown; the nearest key is lr"),
        ("costs=[{kind: exact}]", "algorithm.name=grpo: uses no costs"),
        ("algorithm.name=safe_rlhf", r"costs=\[\]: safe_rlhf needs one"),
        ("algorithm.ptx_coef=0.1", "algorithm.ptx_coef=0.1: with data.pretrain=; a pretrain"),
        ("data.pretrain=x.jsonl", "algorithm.ptx_coef=0.0: with data.pretrain=x.jsonl; a"),
        (
            "filter={kind: equal_rewards, oversample: 33}",
            "filter.oversample=33: must be at most 32$",
        ),
        ("environment.call_pattern=x", "call_pattern: needs environment.call_format=regex, not a"),
        ("rewards=[{kind: environment}]", "environment.path=: a reward of kind environment needs"),
        ("environment.options.size=4", "environment.options: needs environment.path, the file"),
        (
            "environment={path: a.py, named: {b: {path: b.py}}}",
            "environment.named: .*environment.path, kind or tools names another; give that one",
        ),
        ("environment.named.b={}", "environment.named.b.path: missing; it names the file of the"),
        (
            "environment.named.b.pth=b.py",
            "environment.named.b.pth='b.py': .* environment.named.b.pa",
        ),
        ("environment.named.b=b.py", "environment.named.b='b.py': must be a mapping of settings"),
        (
            "environment.named={1: {path: b.py}}",
            "environment.named.1: the name must be text; quote",
        ),
        ("environment.named={'b c': {path: b.py}}", "environment.named.b c: a name consists of l"),
        (
            "environment.tools=[{kind: pyton}]",
            "an entry is kind: python, or .* this one has kind=p",
        ),
        ("environment.tools=[{king: mcp}]", r"environment.tools\[0\].king='mcp': .* is .*kind"),
        ("environment.named.b={tools: [{kind: mcp, url: a.org}]}", "url=a.org: must begin with"),
        (
            "environment={path: a.py, max_tokens: 255}",
            "environment.max_tokens=255: must be at least generator.max_new_tokens=256, the limit",
        ),
        (
            "environment={path: a.py, episode_timeout_s: 300}",
            "episode_timeout_s=300.0: must be below pipeline.stall_s=300, .*; raise pipe",
        ),
        ("weights={probe_limit: 1, probe_every: 0}", "probe_limit=1.0.* has no .*probe_every=0"),
        ("weights.publish_every=3", "weights.publish_every=3: .*pipeline.max_staleness=1"),
        ("reference.every=2", "reference.every=2: .*uses no reference"),
        ("reference.decay=0.5", "reference.decay=0.5: .*reference.every=0"),
        ("reference={path: a, every: 1}", "reference.every=1: would replace .* reference.path"),
        ("reference.path=a", "reference.path=a: .*uses no reference"),
        ("data.replay.frac=2", r"data.replay.frac=2\.?0?: "),
        ("data.replay={frac: 0.2, siz: 3}", "data.replay.siz=3: .*size"),
        ("data.replay.frac=0.2", "data.replay=.*need truncated importance weights. Set"),
        ("reference.world_size=2", "reference.world_size=2: .*uses no reference"),
        ("reference.replicas=2", "reference.replicas=2: .*uses no reference"),
        ("reference={world_size: 3, tensor_parallel: 2}", "reference.tensor_parallel=2: must divi"),
        (
            "reference={world_size: 4, tensor_parallel: 2, sequence_parallel: 4}",
            "times reference.tensor_parallel=2 must divide reference.world_size=4",
        ),
        (
            "critic.shadow={world_size: 2, sequence_parallel: 3}",
            "critic.shadow.sequence_parallel=3: must divide critic.shadow.world_size=2",
        ),
        (
            "critic.shadow={world_size: 2}",
            "critic.shadow.world_size=2: has no effect .*; set critic.replicas, their number",
        ),
        ("placement={memory_mb: 500, mode: disaggregated}", "memory_mb=500.* has no effect"),
        ("justaword", "'justaword': write an override as key=value"),
    ],
)
def test_an_invalid_setting_is_one_line_with_key_value_and_rule(
    recipe: Path, override: str, message: str
):
    with pytest.raises(ConfigError, match=message) as error:
        load_config(recipe, [override])
    assert "\n" not in str(error.value)


def test_a_sampling_mask_needs_all_words_on_each_rank(recipe: Path):
    overrides = ["generator.sampling_mask={top_k: 3}", "trainer.world_size=2"]
    split = ["trainer={backend: torch, tensor_parallel: 2}", *overrides]
    with pytest.raises(ConfigError, match=r"trainer\.tensor_parallel=2 divides the words"):
        load_config(recipe, split)
    load_config(recipe, overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.name=gpg", "compare all groups of a step"),
        ("algorithm.advantage_scale=batch", "compare all groups of a step"),
        ("algorithm.correction.weight_high=null", "need truncated importance weights"),
        ("pipeline.max_staleness=16", "max_age must be above pipeline.max_staleness=16"),
        ("queue.journal.enabled=false", "a resume needs the kept groups"),
        ("algorithm.name=ppo algorithm.whiten_advantages=false", "without critic"),
    ],
)
def test_replays_need_truncated_weights_and_advantages_of_their_group_alone(
    recipe: Path, override: str, message: str
):
    overrides = [
        "data.replay.frac=0.2",
        "algorithm.correction={proximal: trainer, weights: token}",
    ]
    load_config(recipe, overrides)
    with pytest.raises(ConfigError, match=f"data.replay=.*{message}"):
        load_config(recipe, [*overrides, *override.split()])


def test_ranks_of_a_reference_below_the_policys_adapters_are_refused(recipe: Path):
    overrides = ["algorithm.kl_coef=0.1", "trainer.lora_rank=2", "reference.world_size=2"]
    with pytest.raises(ConfigError, match=r"no effect: below the .* Set reference\.replicas=1"):
        load_config(recipe, overrides)
    load_config(recipe, [*overrides, "reference.replicas=1"])


def test_a_reference_of_a_run_directory_is_its_newest_checkpoint_on_ranks_of_its_own(
    recipe: Path, tmp_path: Path
):
    for step in (2, 10):
        folder = tmp_path / "taught" / "checkpoints" / f"step_{step:06}"
        folder.mkdir(parents=True)
        (folder / "state.json").touch()
    overrides = ["algorithm.kl_coef=0.1", "trainer.lora_rank=2"]
    config = load_config(recipe, [*overrides, f"reference.path={tmp_path}/taught"])
    assert config.reference.path == str(folder / "model")
    # The policy's ranks cannot compute it, although they have a model below the adapters.
    assert "reference" in config.dataflow.calls_by_role


FALLING = ["trainer.lr=1e-3", "trainer.lr_schedule=cosine", "trainer.lr_min=1e-4"]


def iter_rules(kind: type) -> Iterator[tuple[type, str, Bounds | OneOf]]:
    """Yield (class, field, rule) of every rule in a settings dataclass and those nested in it."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        inside = [hint, *get_args(hint)]
        for part in inside:
            if isinstance(part, Bounds | OneOf):
                yield kind, name, part
            elif isinstance(part, type) and is_dataclass(part):
                yield from iter_rules(part)


RULES = dict.fromkeys(
    rule
    for kind in (RunConfig, *(kind.options_type for kind in REWARD_KINDS.values()))
    for rule in iter_rules(kind)
)
BOUNDS = dict.fromkeys(rule for _, _, rule in RULES if isinstance(rule, Bounds))


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_a_message_names_the_exact_bounds(bounds: Bounds):
    """A bound is a value that the rule allows, unless the words exclude it."""
    found = re.findall(r"(at least|above|at most|below) (\S+)", str(bounds))
    assert {float(bound) for _, bound in found} == {bounds.least, bounds.most} - {-inf, inf}
    for words, bound in found:
        assert bounds.holds(float(bound)) == (words in ("at least", "at most"))


def test_every_declared_rule_refuses_the_values_beside_it():
    for kind, name, rule in RULES:
        bad: list[Any] = ["magic"]
        if isinstance(rule, Bounds):
            bad = [rule.least - (not rule.excludes_least)] * (rule.least > -inf)
            bad += [rule.most + (not rule.excludes_most)] * (rule.most < inf)
        for value in bad:
            with pytest.raises(
                ConfigError, match=rf"^a\.b\[1\]\.{name}=\S+: {re.escape(str(rule))}$"
            ):
                prepare_settings({name: value}, kind, "a.b[1]")
    assert len(RULES) > 90


def test_a_removed_key_with_the_value_that_holds_is_ignored(recipe: Path):
    """Run directories of earlier versions name all keys."""
    tools = "environment={tools: [{kind: python, memory_mib: 512, share: false}]}"
    config = load_config(recipe, ["queue.capacity_groups=null", "telemetry.trace=true", tools])
    assert config.environment.tools[0].kind == "python"
    old = "filter={kind: function, options: {path: keep.py, function: keep}}"
    assert load_config(recipe, [old]).filter.function == "keep"


STABLE = "{lr_schedule: warmup_stable_decay, lr_schedule_options: {decay_type: linear}}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "filter={kind: mean_outside, options: {low: 0.1}}",
            "kind=mean_outside: no longer a value; ",
        ),
        ("filter.options={low: 0.1}", "filter.options=.*; kind function has path"),
        ("weights.transport=disk", "weights.transport=disk: no longer a value; an engine"),
        (
            "environment.tools=[{kind: mcp, share: true}]",
            r"tools\[\].share=true: no longer a setting; name a server .* by url",
        ),
        ("queue.store_share=0.9", "queue.store_share=0.9: no longer a setting; 0.5 hol"),
        (
            "environment={tools: [{kind: python, cpu_s: 5}]}",
            r"tools\[\].cpu_s=5: no longer a setting; 60.0 holds",
        ),
        ("queue.hedge_s=3", "hedge_s=3: no longer a setting; use pipeline.on_stall=redeliver;"),
        ("run.debug=true", "run.debug=true: no longer a setting; false holds now;"),
        ("data.prompt_key=question", "data.prompt_key=question: .*; set prompt_"),
        (
            "trainer={lr_schedule: polynomial}",
            "schedule=polynomial: must be one of constant, li",
        ),
        (
            f"critic.trainer={STABLE}",
            "lr_schedule_options=.*; remove the key, in a run that you resume from",
        ),
    ],
)
def test_a_removed_key_with_another_value_is_refused(recipe: Path, override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(recipe, [override])


@pytest.mark.parametrize(
    ("schedule", "renamed", "decay_steps"),
    [
        ("{lr_schedule: cosine_with_min_lr, lr_schedule_options: {}", "cosine", None),
        ("{lr_schedule: polynomial", "linear", None),
        (
            "{lr_schedule: warmup_stable_decay, lr_schedule_options: {num_decay_steps: 60}",
            "cosine",
            60,
        ),
    ],
)
def test_a_schedule_of_earlier_versions_has_the_name_of_its_curve(
    recipe: Path, schedule: str, renamed: str, decay_steps: int | None
):
    trainer = load_config(recipe, [f"trainer={schedule}, lr: 2e-3, lr_min: 5e-5}}"]).trainer
    assert (trainer.lr_schedule, trainer.lr_decay_steps) == (renamed, decay_steps)


def test_critic_settings_are_not_checked_without_a_critic(recipe: Path):
    config = load_config(recipe, FALLING)
    assert "critic" not in count_actors(config)
    ppo = ["algorithm.name=ppo", *FALLING]
    load_config(recipe, [*ppo, "critic.shared_coef=0.5"])
    with pytest.raises(ConfigError) as error:
        load_config(recipe, ppo)
    assert str(error.value) == (
        f"{recipe}: critic.trainer.lr_min=0.0001: must be below lr=1e-05;"
        " it inherits unset keys from trainer"
    )
    load_config(recipe, [*ppo, "critic.trainer.lr_min=1e-6"])
    load_config(recipe, [*ppo, "critic.trainer.lr=1e-3"])


def test_a_missing_or_malformed_file_is_named(tmp_path: Path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(ConfigError, match=r"broken\.yaml: not YAML") as error:
        load_config(broken)
    assert "\n" not in str(error.value)
    broken.write_text("- 1")
    with pytest.raises(ConfigError, match=r"broken\.yaml: \[1\]: must be a mapping of settings$"):
        load_config(broken)


def test_a_setting_may_reference_another(recipe: Path):
    recipe.write_text(recipe.read_text() + "run: {name: 'of-${run.seed}', seed: 7}\n")
    assert load_config(recipe).run.name == "of-7"
    assert load_config(recipe, ["run.seed=8"]).run.name == "of-8"


@pytest.mark.parametrize(
    "value", ["!!bool x", "!!int", "!!timestamp x", "!!int x", "[" * 300 + "]" * 300]
)
def test_a_malformed_override_value_is_refused(recipe: Path, value: str):
    with pytest.raises(ConfigError, match=r"^'run\.name=") as error:
        load_config(recipe, [f"run.name={value}"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_in_the_repository_loads(path: Path):
    config = load_config(path)
    assert config.algorithm_settings.num_updates >= 1
    assert config.algorithm.name in path.stem


def test_an_environment_bounds_what_follows_a_prompt_and_keeps_more_rollouts_open(recipe: Path):
    plain = load_config(recipe)
    assert plain.max_completion_tokens == plain.generator.max_new_tokens
    assert plain.max_open_rollouts == plain.generator.max_concurrent_rollouts
    settings = {"path": "a.py:Game", "max_tokens": 900, "open_episodes": 5000}
    overrides = [f"environment.{key}={value}" for key, value in settings.items()]
    config = load_config(recipe, overrides)
    assert config.environment.path == str(Path("a.py:Game").absolute())
    assert (config.max_completion_tokens, config.max_open_rollouts) == (900, 5000)
    assert config.algorithm_settings.max_length == 900
    calls = {call.stage: call for call in config.dataflow.calls}
    assert {*EPISODE_COLUMNS} <= {*calls["generate"].produces} & {*calls["reward"].needs}


def test_several_environments_come_from_the_file_and_from_overrides(recipe: Path):
    named = "environment: {max_turns: 3, named: {guess: {path: a.py, options: {size: 4}}}}\n"
    recipe.write_text(recipe.read_text() + named)
    config = load_config(recipe, ["environment.named.other.path=b.py:B", "run.seed=1"]).environment
    assert {name: spec.path for name, spec in config.specs.items()} == {
        "guess": str(Path("a.py").absolute()),
        "other": str(Path("b.py:B").absolute()),
    }
    assert config.is_enabled and not config.is_given
    guess = config.select("guess")
    assert guess.single == ("guess", config.named["guess"])
    assert (guess.max_turns, guess.single[1].options) == (3, {"size": 4})


def test_tools_are_read_with_absolute_files_and_need_rewards_of_their_own(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("server.py").touch()
    server = "{kind: mcp, command: [python, server.py], env: [KEY]}"
    overrides = [f"environment.tools=[{{kind: python}}, {server}]"]
    config = load_config(recipe, overrides)
    python, mcp = config.environment.tools
    assert (python.kind, mcp.env) == ("python", ["KEY"])
    assert mcp.command == ["python", str(tmp_path / "server.py")]
    assert config.environment.is_enabled and config.environment.specs == {"": config.environment}
    with pytest.raises(ConfigError, match=r"environment\.path=: .*; tools alone score nothing"):
        load_config(recipe, [*overrides, "rewards=[{kind: environment}]"])
    named = load_config(recipe, ["environment.named.a.tools=[{kind: python}]"]).environment
    assert [tool.kind for tool in named.select("a").single[1].tools] == ["python"]


def test_episodes_need_one_template_for_all_files(recipe: Path):
    files = "data.train=[{path: a.jsonl}, {path: b.jsonl, template: plain}]"
    with pytest.raises(ConfigError, match=r"data.train\[1\].template=plain: differs from data"):
        load_config(recipe, ["environment.path=a.py", files])


def test_an_algorithm_with_greedy_completions_has_no_episodes(recipe: Path):
    with pytest.raises(ConfigError, match=r"algorithm.name=remax: needs a greedy completion"):
        load_config(recipe, ["environment.path=a.py", "algorithm.name=remax"])
