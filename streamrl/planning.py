"""Between a run's config and the planner: what it is asked, and a placement as settings again."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx

from streamrl.config import RunConfig
from streamrl.dataflow import COST_CRITIC, CRITIC, GENERATE, GREEDY, MOVED, POLICY, Call, Kind
from streamrl.errors import ConfigError
from streamrl.placement import (
    STRATEGIES,
    Assignment,
    Cluster,
    Mesh,
    ModelShape,
    Placement,
    PlacementConfig,
    Problem,
    Workload,
    lay_out,
    owner,
    shape_of,
)
from streamrl.placement.config import MIXED
from streamrl.placement.workload import FixedLength, Lengths
from streamrl.preflight import counts, load_files, model_length
from streamrl.resharding import Grid

CRITICS = (CRITIC, COST_CRITIC)
SHADOWS = ("value", "cost_value")
JUDGES = ("reward", "cost")


@dataclass(frozen=True)
class Asked:
    """What a config does not say: sizes of models by role, in place of its own, and lengths.

    lengths: null takes generator.max_new_tokens for all completions, the most they can have.
    """

    prompt_tokens: float
    models: Mapping[str, str] = field(default_factory=dict)
    lengths: Lengths | None = None


def problem_of(config: RunConfig, cluster: Cluster, asked: Asked) -> Problem:
    """What the planner is asked of a run. Raises ConfigError for a model that cannot be sized."""
    algorithm, settings = config.algorithm, config.settings
    workload = Workload(
        config.pipeline.groups_per_step,
        algorithm.group_size,
        asked.prompt_tokens,
        asked.lengths or FixedLength(config.generator.max_new_tokens),
        settings.epochs,
        settings.mini_batches,
        config.pipeline.micro_batch_tokens,
        settings.scope == "step",
    )
    return Problem(config.dataflow, models_of(config, asked.models), workload, cluster)


def models_of(config: RunConfig, named: Mapping[str, str]) -> dict[str, ModelShape]:
    """The shape of each role's model: as named, else of the directory the config has.

    A reward or a cost has one if it is named, or computed with a model.
    """
    roles = {call.follows or call.role for call in config.dataflow.calls}
    for role in named:
        if role not in roles:
            raise ConfigError(
                f"--model {role}={named[role]}: the run has models of {', '.join(sorted(roles))}"
            )
    policy = _sized(named.get(POLICY, config.model.path), POLICY)
    found = {POLICY: policy}
    for role in sorted(roles - {POLICY}):
        if role in named:
            shape = _sized(named[role], role)
        elif role in JUDGES:
            path = _judge(config, role)
            if path is None:
                continue
            shape = _sized(path, role)
        elif role in CRITICS and config.critic.path:
            shape = _sized(config.critic.path, role)
        else:
            shape = policy
        found[role] = shape.critic() if role in (*CRITICS, *JUDGES) else shape
    return found


def _sized(model: str, role: str) -> ModelShape:
    try:
        return shape_of(model)
    except ConfigError as error:
        raise ConfigError(f"{error}; --model {role}=NAME says another") from None


def _judge(config: RunConfig, role: str) -> str | None:
    """The directory of the first model that rewards, or costs, are computed with."""
    for judge in config.rewards if role == "reward" else config.costs:
        if judge.kind == "model":
            return str(judge.options["path"])
    return None


# A run's placement, as the planner writes it.


def run_placement(config: RunConfig, roles: Collection[str]) -> Placement:
    """Where the calls of a run are, of those that compute with the model of one of the roles.

    Devices are numbered from 0; placement.mode=auto is taken for disaggregated.
    """
    numbers = {role: count for role, (_, count) in counts(config).items()}
    split = config.generator.tensor_parallel
    if not config.placement.is_hybrid:
        numbers[GENERATE.role] *= split
    slots = lay_out(config.placement.shared, numbers).slots
    calls = {}
    for call in config.dataflow.ordered:
        if owner(call) not in roles:
            continue
        own = slots[call.role]
        mesh = Mesh(own[0], len(own))
        if call.kind is Kind.TRAIN:
            trainer = config.trainer_of(call.role)
            tensor = trainer.tensor_parallel
            grid = Grid(1, tensor, mesh.size // tensor)
            calls[call.stage] = Assignment(mesh, grid, trainer.zero_stage)
        else:
            tensor = split if call.kind is Kind.GENERATE else 1
            calls[call.stage] = Assignment(mesh, Grid(1, tensor, mesh.size // tensor))
    return packed(Placement(calls, config.pipeline.max_staleness))


def packed(placement: Placement) -> Placement:
    """The same with its devices numbered anew: those that nobody has are left out."""
    held = sorted({d for each in placement.calls.values() for d in each.mesh.devices})
    number = {device: i for i, device in enumerate(held)}
    return replace(
        placement,
        calls={
            stage: replace(each, mesh=Mesh(number[each.mesh.first], each.mesh.size))
            for stage, each in placement.calls.items()
        },
    )


# A placement, as the settings of a run.


def placed_run(config: RunConfig, placement: Placement) -> RunConfig:
    """The same run, placed so; `run_placement` is the inverse, but for the devices' numbers.

    Raises ConfigError naming the call, or the devices, that streamrl cannot run so.
    """
    stages = {call.stage: call for call in config.dataflow.calls if call.stage in placement.calls}
    for stage, call in stages.items():
        _check_runs(call, placement.calls[stage], placement)
    roles = {call.role: placement.calls[stage] for stage, call in stages.items()}
    sized = _sized_run(config, roles, placement.max_staleness)
    nearest = None
    for pools in _ways(config, placement):
        try:
            found = replace(sized, placement=pools)
        except ConfigError as error:
            nearest = nearest or str(error)
            continue
        again = run_placement(found, {owner(call) for call in stages.values()})
        if _relations(again) == _relations(placement):
            return found
        nearest = f"the nearest is {again}"
    raise ConfigError(f"placement: no pools of roles are {placement}; {nearest}")


def _check_runs(call: Call, assignment: Assignment, placement: Placement) -> None:
    place, grid = f"placement.{call.stage}: {assignment}", assignment.grid
    if grid.stages > 1:
        raise ConfigError(f"{place}: streamrl trains and serves without pipeline stages")
    if call.kind is Kind.SCORE and grid.tensor > 1:
        raise ConfigError(f"{place}: a model that scores is whole on each of its devices")
    if call == GREEDY and placement.calls[GENERATE.stage] != assignment:
        raise ConfigError(f"{place}: the generators' devices are {placement.calls['generate']}")
    if call.kind is Kind.TRAIN and grid.tensor > 1 and assignment.zero_stage in (1, 2):
        raise ConfigError(
            f"{place}: ZeRO {assignment.zero_stage} does not go with tensor parallelism; 0 and 3 do"
        )


def _sized_run(config: RunConfig, roles: Mapping[str, Assignment], max_staleness: int) -> RunConfig:
    """The run with as many actors, and as many devices for each, as the placement has."""

    def trained(assignment: Assignment) -> dict[str, Any]:
        found: dict[str, Any] = {"world_size": assignment.mesh.size}
        found |= {"tensor_parallel": assignment.grid.tensor, "zero_stage": assignment.zero_stage}
        return found | ({"backend": "torch"} if assignment.grid.tensor > 1 else {})

    generator, policy = roles[GENERATE.role], roles[POLICY]
    changed = replace(
        config,
        pipeline=replace(config.pipeline, max_staleness=max_staleness, depth=None),
        trainer=replace(config.trainer, **trained(policy)),
        generator=replace(
            config.generator,
            replicas=generator.grid.replicas,
            tensor_parallel=generator.grid.tensor,
        ),
    )
    judges = [roles[role].mesh.size for role in JUDGES if role in roles]
    if judges:
        changed = replace(changed, scorer=replace(changed.scorer, replicas=judges[0]))
    if MOVED in roles:
        replicas = roles[MOVED].mesh.size
        changed = replace(changed, reference=replace(changed.reference, replicas=replicas))
    critics = [role for role in CRITICS if role in roles]
    if critics:
        trainer = {**config.critic.trainer, **trained(roles[critics[0]])}
        changed = replace(changed, critic=replace(changed.critic, trainer=trainer))
    shadows = [roles[role].mesh.size for role in SHADOWS if role in roles]
    if shadows:
        changed = replace(changed, critic=replace(changed.critic, replicas=shadows[0]))
    return changed


def _ways(config: RunConfig, placement: Placement) -> Iterator[PlacementConfig]:
    """What may say who shares devices: the strategies that have a name, then pools of roles."""
    there = config.placement
    for mode in ("disaggregated", *STRATEGIES):
        yield replace(there, mode=mode, pools=[], memory_mb=None)
    meshes = {
        call.role: placement.calls[call.stage].mesh
        for call in config.dataflow.calls
        if call.stage in placement.calls
    }
    graph = nx.Graph([(a, b) for a in meshes for b in meshes if meshes[a].overlaps(meshes[b])])
    pools = []
    for roles in nx.connected_components(graph):
        size = len({device for role in roles for device in meshes[role].devices})
        ordered = sorted(roles, key=lambda role: (meshes[role].first, -meshes[role].size, role))
        pools.append({role: meshes[role].size / size for role in ordered})
    yield replace(there, mode=MIXED, pools=[p for p in pools if len(p) > 1], memory_mb=None)


def _relations(placement: Placement) -> dict[Any, Any]:
    """How large each call is and how, and how it lies to those it shares devices with."""
    calls = placement.calls
    sizes: dict[Any, Any] = {stage: (each.grid, each.mesh.size) for stage, each in calls.items()}
    shifts = {
        (one, other): calls[other].mesh.first - calls[one].mesh.first
        for one in calls
        for other in calls
        if one < other and placement.overlaps(one, other)
    }
    zero = {("zero", s): calls[s].zero_stage for s in calls if s.startswith("train")}
    return {**sizes, **shifts, **zero}


def mean_prompt_tokens(config: RunConfig) -> float:
    """Of data.train, as the model of the run reads it. Raises ConfigError if that cannot be had."""
    try:
        limit = config.data.prompt_limit(
            model_tokens=model_length(config.model.path, limit=config.model.max_length),
            max_new_tokens=config.generator.max_new_tokens,
        )
        loaded = load_files(config, config.data.train_files, limit)
    except ConfigError as error:
        raise ConfigError(f"{error}; --prompt-tokens N says how long prompts are") from None
    sizes = [len(prompt.token_ids) for prompt in loaded.prompts]
    return sum(sizes) / len(sizes)
