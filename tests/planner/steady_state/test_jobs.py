"""Durations of jobs."""

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.costs.generation_model import GenerationModel
from streamrl.planner.problem.problem import RunOptions
from streamrl.planner.problem.stage_timings import ScoreTiming, StageTimings, TrainTiming
from streamrl.planner.problem.workload import LognormalLengths, Workload
from streamrl.planner.steady_state.jobs import CallGraph, JobGraph, make_ahead_job
from streamrl.resharding.grids import RankGrid
from tests.planner.samplers import sampler

GRPO = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs"))
WORKLOAD = Workload(8, 1, 100, LognormalLengths(80, 0.5, 400))


def assign_devices(first: int, size: int) -> CallAssignment:
    return CallAssignment(Mesh(first, size), RankGrid(1, 1, size))


@pytest.mark.parametrize(("slice_s", "scored_s"), [(0.5, 8.0), (1.0, 6.0), (2.0, 4.0), (5.0, 2.0)])
def test_generation_ahead_pauses_for_a_group_after_every_slice(slice_s: float, scored_s: float):
    # Groups take 1 s each. 12 s of generation hold as many turns of slice and group as fit; with
    # the shortest slice all 8 groups are scored before the end.
    placement = Placement(
        {
            "generate": assign_devices(0, 8),
            "reference": assign_devices(0, 8),
            "train": assign_devices(8, 1),
        },
        1,
    )
    timings = StageTimings(
        sampler(0.1, replicas=8),
        {"reference": ScoreTiming(8, 1, 1.0, 0.0, 0.0)},
        {"policy": TrainTiming(1, 1.0, 0.0, 1.0)},
    )
    jobs = JobGraph(
        CallGraph.from_dataflow(GRPO), WORKLOAD, placement, timings, RunOptions(slice_s=slice_s)
    )
    jobs.completion_spans = [(1.0, 12.0)]
    all_jobs = jobs.build_jobs(make_ahead_job(jobs, GenerationModel(WORKLOAD)))
    (reference,) = (job for job in all_jobs if job.stage == "reference" and job.is_queued)
    assert sum(reference.parts) == pytest.approx(scored_s)
