"""HybridFlow's figures: best placement, best generation tensor parallelism (t_g), transitions."""

import math
from collections.abc import Iterator, Mapping

from benchmarks.published.families import Families, FamilyPlan
from benchmarks.published.points import FIG_12, FIG_12_STANDALONE, FIG_15
from benchmarks.published.rows import Row
from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import MODEL_SHAPES
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.costs.generation_model import GenerationModel
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.workload import Workload, make_fixed_lengths
from streamrl.resharding.grids import RankGrid

PPO = build_dataflow(("generator_logprobs", "scores", "ref_logprobs", "values"))
CLUSTER = Cluster.from_text("16x8xA100@200Gb")
CONSTANTS = CostConstants(
    train_flops_fraction=0.5,
    half_width=64.0,
    reduced_bytes=2,
    network_fraction=0.9,
    decode_memory_fraction=0.6,
    decode_step_s=12e-3,
    decode_rollout_s=300e-6,
    memory_reserve_fraction=0.22,
)
"""vLLM and Megatron in 2024, one set for all points. The host adds much time to a decode step and
to each rollout in it; gradients are reduced in bfloat16."""
ACTOR, CRITIC = ("generator", "policy"), ("value", "critic")
FAMILIES = {
    "colocate": ((*ACTOR, "reference", *CRITIC, "reward"),),
    "split": ((*ACTOR, "reference"), (*CRITIC, "reward")),
    "standalone": (ACTOR, CRITIC, ("reference",), ("reward",)),
}
"""Placements in Figure 12: roles that share devices."""
SIZES = (1, 2, 4, 8)


def build_problem(model: str, cluster: Cluster = CLUSTER) -> PlacementProblem:
    """Build PPO with four models of one size."""
    shape = MODEL_SHAPES[model]
    models = {"policy": shape, "reference": shape}
    models |= {"critic": shape.to_critic(), "reward": shape.to_critic()}
    workload = Workload(1024, 1, 1024, make_fixed_lengths(1024), mini_batches=8)
    return PlacementProblem(PPO, models, workload, cluster)


def predict_generation_s(model: str) -> dict[int, float]:
    """Predict generation seconds by t_g on 16 devices, trained as 1-8-2; inf: out of memory."""
    problem = build_problem(model, Cluster.from_text("2x8xA100@200Gb"))
    costs, generation, mesh = (
        CostModel(problem, CONSTANTS),
        GenerationModel(problem.workload),
        Mesh(0, 16),
    )
    seconds = {}
    for size in SIZES:
        calls = dict.fromkeys(problem.placed_stages, CallAssignment(mesh, RankGrid(1, 8, 2)))
        calls["generate"] = CallAssignment(mesh, RankGrid(1, size, 16 // size))
        placement = Placement(calls)
        seconds[size] = math.inf
        if not costs.explain_infeasible(placement):
            seconds[size] = generation.find_completions_s(
                costs.predict_timings(placement).generator, (1.0,)
            )[-1]
    return seconds


def find_best_families(families: Families, devices: int) -> Mapping[str, FamilyPlan]:
    """Find the best placement of each family that has a node per set."""
    return {
        name: families.find_best(sets, devices)
        for name, sets in FAMILIES.items()
        if len(sets) <= devices // families.per_node
    }


def build_families(model: str) -> Families:
    problem = build_problem(model)
    return Families(problem, CostModel(problem, CONSTANTS))


def iter_rows() -> Iterator[Row]:
    yield from iter_figure_15()
    yield from iter_figure_12()


def iter_figure_15() -> Iterator[Row]:
    """Yield the best and the slowest t_g, and the time that the best saves."""
    for point in FIG_15:
        seconds = predict_generation_s(point.model)
        best = min(SIZES, key=seconds.__getitem__)
        setting = f"{point.model}, 16 GPUs"
        yield Row("hybridflow", "Fig. 15", setting, "best t_g", str(point.best), str(best))
        fitting = [size for size in SIZES if math.isfinite(seconds[size])]
        slowest = max(fitting, key=seconds.__getitem__)
        yield Row("hybridflow", "Fig. 15", setting, "slowest t_g", "8", str(slowest))
        saved = 1 - seconds[point.best] / seconds[8]
        quantity = f"t_g={point.best} against t_g=8, part of the time"
        yield Row("hybridflow", "Fig. 15", setting, quantity, 1 - point.saved, 1 - saved)


def iter_figure_12() -> Iterator[Row]:
    """Yield the best placement by model and number of devices."""
    families = {model: build_families(model) for model in dict.fromkeys(m for m, _ in FIG_12)}
    for (model, devices), printed in FIG_12.items():
        plans = find_best_families(families[model], devices)
        best = min(plans, key=lambda name: plans[name].step_s)
        times = ", ".join(f"{name} {_format_seconds(plan.step_s)}" for name, plan in plans.items())
        setting = f"{model}, {devices} GPUs ({times})"
        yield Row("hybridflow", "Fig. 12", setting, "best placement", printed, best)
        if printed == "standalone":
            nodes = plans[printed].nodes
            sizes = ", ".join(str(count * families[model].per_node) for count in nodes)
            problem = ", ".join(map(str, FIG_12_STANDALONE))
            quantity = "GPUs of actor, critic, reference, reward if standalone"
            yield Row("hybridflow", "Fig. 12", f"{model}, {devices} GPUs", quantity, problem, sizes)


def _format_seconds(step_s: float) -> str:
    return "does not fit" if math.isinf(step_s) else f"{step_s:.0f} s"
