"""`streamrl plan`: find the best placement of a run on a cluster.

The search ranks candidate placements by the steady-state estimate of their step time. The simulator
then runs the best placements of each staleness bound and decides.
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from streamrl.cli.arguments.arg_types import parse_path, parse_whole_number
from streamrl.cli.arguments.planner_args import (
    add_problem_arguments,
    check_simulation_time,
    read_planner_inputs,
)
from streamrl.cli.output.output_files import check_output_file, write_output_file
from streamrl.config.run_config import (
    RunConfig,
    dump_config,
    load_config,
    with_settings,
)
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import format_yaml
from streamrl.placement.clusters import GB, Cluster
from streamrl.placement.placements import MAX_STALENESS
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.plan_report import (
    PlanReport,
    SimulatedPoint,
    format_count,
)
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.search.hybridflow import (
    ParallelismChoices,
    can_fit,
)
from streamrl.planner.search.planner import (
    DEFAULT_PROPOSALS,
    BoundOptimum,
    ExcludedBound,
    PlacementCandidate,
    plan_placement,
)
from streamrl.planner.simulator.quick_run import (
    choose_num_steps,
    estimate_quick_run_s,
    estimate_simulation_s,
    run_quick_simulation,
    split_workload,
)
from streamrl.planner.simulator.results import SimulationResult
from streamrl.planner.steady_state.estimator import (
    PlacementEstimator,
    PlacementKey,
    make_placement_key,
)
from streamrl.planner.to_placement import (
    apply_placement,
    configure_for_cluster,
    has_shared_generator_devices,
    make_run_refusal,
    make_split_rules,
)
from streamrl.telemetry.progress import ProgressLine, show_progress

MICRO_BATCH_DIVISORS = (2, 4, 8, 16)
"""Divisors of the configured micro-batch size to try."""
CLUSTER_MULTIPLES = (2, 3, 4, 8)
"""Multiples of the number of devices to try."""
HOST_MULTIPLES = (1.25, 1.5, 2, 3, 4, 8)
"""Multiples of a node's main memory to try."""
MAX_DEVICES = 512
SIMULATION_LIMIT_S = 3.3
"""Estimated seconds of simulations beyond which only the best placements are simulated."""
LORA_RANK = 16

SettingValues = Mapping[str, Any]
ProblemBuilder = Callable[[RunConfig, Cluster], tuple[PlacementProblem, CostConstants]]
"""Returns the planner problem of a config on a cluster, and the constants of its costs."""


def suggest_fixes(config: RunConfig, cluster: Cluster, build_problem: ProblemBuilder) -> list[str]:
    """Return command-line arguments, each of which alone lets some placement fit the memory."""

    def fits(settings: SettingValues, on: Cluster = cluster) -> bool:
        try:
            changed = with_settings(config, settings)
            problem, constants = build_problem(changed, on)
            costs = _make_costs(changed, problem, constants)
            rules = make_split_rules(changed, problem)
        except ConfigError:
            return False
        return (changed != config or on is not cluster) and can_fit(
            ParallelismChoices(PlacementEstimator(problem, costs), rules=rules)
        )

    tokens, key = config.pipeline.micro_batch_tokens, "pipeline.micro_batch_tokens"
    smaller = ({key: tokens // divisor} for divisor in MICRO_BATCH_DIVISORS)
    freed: list[SettingValues] = [{"generator.kv_cache_mb": None}, {"scorer.offload": False}]
    fixes = [s for s in freed if fits(s)]
    fixes += [s for s in smaller if fits(s)][:1]
    adapters: SettingValues = {"trainer.lora_rank": LORA_RANK}
    if not fixes and not config.trainer.lora_rank and fits(adapters):
        fixes.append(adapters)
    overrides = [f"{key}={format_yaml(value)}" for fix in fixes for key, value in fix.items()]
    larger_clusters = (
        _scale_cluster(cluster, times)
        for times in CLUSTER_MULTIPLES
        if cluster.num_devices * times <= MAX_DEVICES
    )
    roomier = [_scale_main_memory(cluster, times) for times in HOST_MULTIPLES]
    for clusters in (larger_clusters, roomier if fits({}, roomier[-1]) else ()):
        sufficient = next((larger for larger in clusters if fits({}, larger)), None)
        overrides += [f"--cluster {sufficient}"] if sufficient else []
    return overrides


def _scale_main_memory(cluster: Cluster, times: float) -> Cluster:
    return Cluster(
        tuple(
            replace(group, host_bytes=math.ceil(times * group.node_host_bytes / GB) * GB)
            for group in cluster.node_groups
        )
    )


def _scale_cluster(cluster: Cluster, times: int) -> Cluster:
    """Multiply the devices; a partly used single node grows if it has room, else nodes do."""
    groups = []
    for group in cluster.node_groups:
        per_node = group.device.devices_per_node
        if group.num_nodes == 1 and group.devices_per_node * times <= per_node:
            groups.append(replace(group, devices_per_node=group.devices_per_node * times))
        else:
            groups.append(replace(group, num_nodes=group.num_nodes * times))
    return Cluster(tuple(groups))


MAX_PROPOSALS = 100_000
UNPLACED = (
    *("placement.mode=disaggregated", "placement.pools=[]", "placement.memory_mb=null"),
    *("pipeline.depth=null", "critic.replicas=0", "critic.shadow={}", "reference.replicas=null"),
    *("reference.world_size=1", "reference.tensor_parallel=1", "reference.sequence_parallel=1"),
)
"""Settings of a run to plan: the plan places it, and generates as far ahead as a bound allows."""
DEFAULT_BOUNDS = "0,1,2,4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "streamrl plan CONFIG [key=value ...] --cluster 8xH100 [options]"
    parser.epilog = (
        "Plan chooses the placement: it does not use placement.mode, placement.pools and the"
        " numbers of devices of the config. `streamrl simulate` estimates the config's own."
    )
    add_problem_arguments(parser)
    parser.add_argument(
        "--max-staleness",
        type=parse_bounds,
        metavar="LIST",
        help="bounds to choose from, e.g. 0,1,4 (default: the config's own, compared with"
        f" {DEFAULT_BOUNDS})",
    )
    parser.add_argument(
        "--proposals",
        type=partial(parse_whole_number, least=0, most=MAX_PROPOSALS),
        default=DEFAULT_PROPOSALS,
        metavar="N",
        help=f"proposals of each random search ({DEFAULT_PROPOSALS})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        *("-o", "--output"),
        type=parse_path,
        metavar="FILE",
        help="write the best placement to FILE.yaml, as a config to train with",
    )


def run(arguments: argparse.Namespace) -> int:
    """Return exit code 0 if a placement fits the cluster, else 1."""
    _check_options(arguments)
    with show_progress("reading config and data") as progress:
        report, settings = _plan(arguments, progress)
    if arguments.json:
        print(json.dumps(report.to_json(settings)))
    else:
        print(report.to_text(settings))
    return 0 if report.best_row is not None else 1


def _plan(
    arguments: argparse.Namespace, progress: ProgressLine
) -> tuple[PlanReport, dict[str, Any]]:
    """Search a placement and write the files asked for; return the settings that -o changes too."""
    config, own_bound, bounds, refused = read_staleness_request(arguments)
    inputs = read_planner_inputs(arguments, config)
    problem, constants = inputs.build_problem(config)
    output = arguments.output
    if output is not None and not problem.cluster.is_uniform:
        raise ConfigError(
            f"-o {output}: a config cannot choose between unlike nodes (devices, their number,"
            f" network or memory), as in {problem.cluster}; without -o the devices are printed,"
            " with --json for scripts"
        )
    # The workload is split over generators, at most one per device.
    share = split_workload(problem.workload, problem.cluster.num_devices)
    simulation_s = sum(
        estimate_simulation_s(
            share, len(problem.dataflow.ordered_calls), steps=choose_num_steps(share, bound)
        )
        for bound in bounds
    )
    check_simulation_time(simulation_s, problem.workload, prefix="")

    costs = _make_costs(config, problem, constants)
    progress.describe("searching", unit="placements")
    planned = plan_placement(
        problem,
        lambda part: costs if part is problem else _make_costs(config, part, constants),
        max_staleness=bounds,
        seed=arguments.seed,
        rules=make_split_rules(config, problem),
        proposals=arguments.proposals,
        run_bound=own_bound,
        on_estimated=progress.advance,
    )
    front = planned.points
    progress.describe("simulating", len(front), "placements")
    simulated = _simulate_front(problem, front, costs, arguments.seed, own_bound, progress.advance)
    kept, lost = select_gaining_points(simulated, own_bound)
    progress.describe("comparing")
    fixes = suggest_fixes(config, inputs.cluster, inputs.build_problem) if not kept else []
    report = PlanReport(config, problem, planned, kept, [*refused, *lost], own_bound, fixes)
    settings = _write_files(arguments, report, costs) if report.best_row is not None else {}
    return report, settings


def _make_costs(
    config: RunConfig, problem: PlacementProblem, constants: CostConstants
) -> CostModel:
    """Return the costs of a problem's placements, of which it refuses what the run refuses."""
    return CostModel(problem, constants, explain_refusal=make_run_refusal(config, problem))


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that are invalid whatever the config contains."""
    output = arguments.output
    if output is not None:
        if output.suffix != ".yaml":
            raise ConfigError(f"-o {output}: must end in .yaml")
        inputs = [arguments.config, arguments.constants or arguments.config]
        check_output_file("-o", output, inputs=inputs)


def parse_bounds(text: str) -> Sequence[int]:
    """Return the staleness bounds in a text such as "0,1,4", sorted."""
    words = text.split(",")
    if not all(re.fullmatch(r"\s*\d{1,9}\s*", w) and int(w) <= MAX_STALENESS for w in words):
        rule = f"must be numbers from 0 to {MAX_STALENESS}, e.g. 0,1"
        raise argparse.ArgumentTypeError(f"{text}: {rule}")
    return sorted({int(word) for word in words})


def read_staleness_request(
    arguments: argparse.Namespace,
) -> tuple[RunConfig, int | None, list[int], list[ExcludedBound]]:
    """Return the config to plan, and the staleness bounds for which to plan placements.

    The tuple contains the config, the config's own max_staleness (None if --max-staleness is
    given), the bounds that the other settings allow, and the excluded bounds with their reasons.
    Raises ConfigError if the config is invalid with each of the bounds.
    """
    path, overrides, own_bound = arguments.config, arguments.overrides, None
    if arguments.max_staleness is not None:
        bounds = arguments.max_staleness
    else:
        own_bound = load_config(path, overrides, skips_dry_run=True).pipeline.max_staleness
        if own_bound > MAX_STALENESS:
            raise ConfigError(
                f"pipeline.max_staleness={own_bound}: the planner supports at most {MAX_STALENESS}"
            )
        bounds = sorted({own_bound, *parse_bounds(DEFAULT_BOUNDS)})
    configs, refused = {}, []
    for bound in bounds:
        settings = (*overrides, *UNPLACED, f"pipeline.max_staleness={bound}")
        try:
            # The dry run of the algorithm would take as long as a small search.
            configs[bound] = load_config(path, settings, skips_dry_run=True)
        except ConfigError as error:
            refused.append(ExcludedBound(bound, str(error)))
    if not configs:
        raise ConfigError(refused[0].why)
    config = configs.get(bounds[0] if own_bound is None else own_bound)
    return config or next(iter(configs.values())), own_bound, list(configs), refused


def _simulate_front(
    problem: PlacementProblem,
    front: Sequence[BoundOptimum],
    costs: CostModel,
    seed: int,
    own_bound: int | None,
    on_simulated: Callable[[], None],
) -> list[SimulatedPoint]:
    """Simulate the placement of each bound, and the runner-ups of the bound that is planned.

    That is `own_bound`, else the fastest; the fastest of its placements takes its place. Runner-ups
    are left out where all simulations would take longer than SIMULATION_LIMIT_S. on_simulated:
    called after each point.
    """
    workload, results = problem.workload, dict[PlacementKey, SimulationResult]()

    def estimate_s(candidate: PlacementCandidate) -> float:
        # How much of a run a simulation needs is only known of its placement.
        placement = candidate.placement
        timings = costs.predict_timings(placement)
        return estimate_quick_run_s(timings, workload, placement.max_staleness)

    seconds = sum(estimate_s(point.candidate) for point in front)
    check_simulation_time(seconds, workload, prefix="")

    def simulate(candidate: PlacementCandidate) -> SimulationResult:
        # Several bounds may have the same placement.
        placement = candidate.placement
        key = make_placement_key(placement)
        if key not in results:
            timings = costs.predict_timings(placement)
            results[key] = run_quick_simulation(
                problem.dataflow,
                placement,
                timings,
                workload,
                seed=seed,
                run_options=problem.run_options,
            )
        return results[key]

    points: list[SimulatedPoint] = []
    for point in front:
        points.append((point, simulate(point.candidate)))
        on_simulated()
    if not points:
        return []
    chosen = max(points, key=lambda row: (row[0].max_staleness == own_bound, -row[1].mean_step_s))
    candidates = [chosen[0].candidate]
    for other in chosen[0].runner_ups:
        seconds += estimate_s(other)
        candidates += [other] if seconds <= SIMULATION_LIMIT_S else []
    fastest = min(candidates, key=lambda candidate: simulate(candidate).mean_step_s)
    row = replace(chosen[0], candidate=fastest), simulate(fastest)
    return [row if point is chosen else point for point in points]


def select_gaining_points(
    simulated: Sequence[SimulatedPoint], own_bound: int | None = None
) -> tuple[list[SimulatedPoint], list[ExcludedBound]]:
    """Split simulated points into points worth showing, and excluded bounds with their reasons.

    A point is worth showing if its simulated throughput exceeds that of all lower staleness bounds,
    or if its bound is `own_bound`, the bound of the run's config.
    """
    kept: list[SimulatedPoint] = []
    lost: list[ExcludedBound] = []
    for point, result in simulated:
        best, most = max(kept, key=lambda row: row[1].tokens_per_s, default=(point, None))
        is_own = point.max_staleness == own_bound
        if most is None or is_own or result.tokens_per_s > most.tokens_per_s:
            kept.append((point, result))
            continue
        reason = (
            f"simulated, it has {format_count(result.tokens_per_s)} tokens/s, and"
            f" {best.max_staleness} has {format_count(most.tokens_per_s)}"
        )
        lost.append(ExcludedBound(point.max_staleness, reason))
    return kept, lost


def _write_files(
    arguments: argparse.Namespace, report: PlanReport, costs: CostModel
) -> dict[str, Any]:
    """Write the file of -o; return the settings, by dotted key, that it changes."""
    if arguments.output is None:
        return {}
    config = _make_planned_run(report, costs)
    before = asdict(_read_requested_run(arguments, report))
    write_output_file("-o", arguments.output, dump_config(config))
    return _diff_settings(before, asdict(config))


def _read_requested_run(arguments: argparse.Namespace, report: PlanReport) -> RunConfig:
    """Load the config that the user named, to compare the written config with it.

    Without a valid one (--max-staleness may replace an invalid bound) returns the planned config.
    """
    try:
        return load_config(arguments.config, arguments.overrides)
    except ConfigError:
        return report.config


def _make_planned_run(report: PlanReport, costs: CostModel) -> RunConfig:
    placement, problem = report.best_point.candidate.placement, report.problem
    is_bounded = problem.cluster.is_cpu or has_shared_generator_devices(placement)
    kv_cache_bytes = costs.compute_kv_cache_bytes(placement) if is_bounded else None
    placed = apply_placement(report.config, placement, kv_cache_bytes=kv_cache_bytes)
    return configure_for_cluster(
        placed, problem.cluster, longest_tokens=problem.workload.max_rollout_tokens
    )


def _diff_settings(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Return the settings of `after` that differ, by dotted key. prefix: start of the keys."""
    changed: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            changed |= _diff_settings(old, value, f"{prefix}{key}.")
        elif key in ("rewards", "costs"):
            for i, (old_entry, entry) in enumerate(zip(old or (), value, strict=True)):
                changed |= _diff_settings(old_entry, entry, f"{prefix}{key}[{i}].")
        elif value != old:
            changed[f"{prefix}{key}"] = value
    return changed
