"""Entry point of the simulator: run a placement in virtual time."""

from collections.abc import Callable

from streamrl.dataflow import CallKind, Dataflow
from streamrl.engines.memory.gc_paused import pause_gc
from streamrl.errors import ConfigError
from streamrl.placement.placements import MAX_STALENESS, Placement
from streamrl.planner.problem.problem import RunOptions
from streamrl.planner.problem.stage_timings import StageTimings
from streamrl.planner.problem.workload import Workload
from streamrl.planner.simulator.replicas.failures import FailureModel
from streamrl.planner.simulator.replicas.virtual_loop import run_virtual
from streamrl.planner.simulator.results import SimulationResult
from streamrl.planner.simulator.scenario import SimulationScenario
from streamrl.planner.simulator.world import SimulatedRun


def run_simulation(  # noqa: PLR0913
    dataflow: Dataflow,
    placement: Placement,
    timings: StageTimings,
    workload: Workload,
    *,
    steps: int,
    seed: int,
    failures: FailureModel | None = None,
    run_options: RunOptions | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> SimulationResult:
    """Simulate a run of `steps` training steps under a placement. Equal seeds give equal results.

    on_step: called when a step has ended for the first time. Raises ConfigError if a stage has no
    timings, or if the longest completion fits neither a micro-batch nor the KV cache of a
    generator.
    """
    run_options = run_options or RunOptions()
    check_timings(dataflow, timings)
    check_workload(workload, timings, steps)
    if run_options.on_stale == "drop" and not placement.is_streamed:
        raise ConfigError(
            "on_stale=drop: requires a streamed placement; this one trains whole steps and cannot"
            " drop stale groups"
        )
    lead = run_options.get_max_steps_ahead(placement.max_staleness)
    if lead > MAX_STALENESS:
        raise ConfigError(f"depth={lead}: must be at most {MAX_STALENESS} steps ahead")
    if run_options.publish_every > lead + 1:
        raise ConfigError(
            f"publish_every={run_options.publish_every}: must be at most {lead + 1}: generation"
            f" runs {lead} steps ahead and would wait forever for an unpublished version"
        )
    scenario = SimulationScenario(
        dataflow, placement, timings, workload, steps, seed, run_options, failures
    )
    with pause_gc():
        return run_virtual(_simulate_scenario(scenario, on_step), polls=False)


def check_timings(dataflow: Dataflow, timings: StageTimings) -> None:
    """Raise ConfigError if a score stage or a trained role has no timings."""
    for call in dataflow.select_calls(CallKind.SCORE):
        if call.stage not in timings.score:
            raise ConfigError(f"timings.score.{call.stage}: missing")
    for role in dataflow.trained_roles:
        if role not in timings.train:
            raise ConfigError(f"timings.train.{role}: missing")


def check_workload(workload: Workload, timings: StageTimings, steps: int) -> None:
    """Raise ConfigError if the workload is invalid, or the longest rollout exceeds the KV cache."""
    if steps < 1:
        raise ConfigError(f"steps={steps}: must be at least 1")
    workload.check_micro_batch_tokens()
    longest = workload.rounded_prompt_tokens + workload.completion_lengths.max_tokens
    if timings.generator.kv_tokens < longest:
        raise ConfigError(
            f"timings.generator.kv_tokens={timings.generator.kv_tokens:g}: must be at least"
            f" {longest}, the tokens of a prompt and its longest completion"
        )


async def _simulate_scenario(
    scenario: SimulationScenario, on_step: Callable[[], None]
) -> SimulationResult:
    """Run a scenario on this event loop; exclude the first and last steps from the means."""
    run = SimulatedRun(scenario, on_step)
    await run.run()
    lead = scenario.pipeline_config.max_steps_ahead
    result = SimulationResult(
        dataflow=scenario.dataflow,
        workload=scenario.workload,
        max_staleness=scenario.placement.max_staleness,
        outcomes=run.outcomes,
        step_ends=run.step_ends,
        queue_depths=run.queue.queue_depths,
        spans_by_process=run.context.recordings.spans_by_process,
        process_names=run.process_names,
        crashes=run.crashes,
        first_step_ends=run.first_step_ends,
        warm_up_steps=0,
    )
    warm_up = lead + 1 + scenario.steps // 10
    counted_steps = scenario.steps - warm_up - lead
    return result.exclude_steps(
        scenario.steps - lead - scenario.run_options.round_to_publish_every(counted_steps), lead
    )
