"""A placement's run in virtual time."""

from streamrl.dataflow import CallKind, Dataflow
from streamrl.engines.memory.gc_paused import pause_gc
from streamrl.errors import ConfigError
from streamrl.placement.placements import MAX_STALENESS, Placement
from streamrl.placement.run_options import RunOptions
from streamrl.placement.stage_timings import StageTimings
from streamrl.placement.workload import Workload
from streamrl.simulator.replicas.failures import FailureModel
from streamrl.simulator.replicas.virtual_loop import run_virtual
from streamrl.simulator.results import SimulationResult
from streamrl.simulator.scenario import SimulationScenario
from streamrl.simulator.world import SimulatedRun


def run_simulation(  # noqa: PLR0913
    dataflow: Dataflow,
    placement: Placement,
    timings: StageTimings,
    workload: Workload,
    *,
    steps: int,
    seed: int,
    failures: FailureModel | None = None,
    manner: RunOptions | None = None,
) -> SimulationResult:
    """What a run of so many steps would do; the same for the same seed.

    Raises ConfigError for what no run could be: stages without timings, completions that fit no
    micro-batch or no generator.
    """
    manner = manner or RunOptions()
    check_timings(dataflow, timings)
    check_workload(workload, timings, steps)
    if manner.on_stale == "drop" and not placement.is_streamed:
        raise ConfigError(
            "on_stale=drop: not with a placement that is not streamed: steps are whole"
        )
    lead = manner.max_steps_ahead(placement.max_staleness)
    if lead > MAX_STALENESS:
        raise ConfigError(f"depth={lead}: steps ahead: must be at most {MAX_STALENESS}")
    if manner.publish_every > lead + 1:
        raise ConfigError(
            f"publish_every={manner.publish_every}: with generation {lead} steps ahead nobody would"
            f" sample what is to be trained next; must be at most {lead + 1}"
        )
    scenario = SimulationScenario(
        dataflow, placement, timings, workload, steps, seed, manner, failures
    )
    with pause_gc():
        return run_virtual(_simulate_scenario(scenario), polls=False)


def check_timings(dataflow: Dataflow, timings: StageTimings) -> None:
    """Raise ConfigError if a stage that scores or a role that is trained has none."""
    for call in dataflow.select_calls(CallKind.SCORE):
        if call.stage not in timings.score:
            raise ConfigError(f"timings.score.{call.stage}: missing")
    for role in dataflow.trained_roles:
        if role not in timings.train:
            raise ConfigError(f"timings.train.{role}: missing")


def check_workload(workload: Workload, timings: StageTimings, steps: int) -> None:
    """Raise ConfigError if it is none, or its longest rollout has no room."""
    if steps < 1:
        raise ConfigError(f"steps={steps}: must be at least 1")
    workload.check_micro_batch_tokens()
    longest = workload.rounded_prompt_tokens + workload.lengths.max_tokens
    if timings.generator.kv_tokens < longest:
        raise ConfigError(
            f"timings.generator.kv_tokens={timings.generator.kv_tokens:g}: must be at least"
            f" {longest}, the tokens of a prompt and its longest completion"
        )


async def _simulate_scenario(scenario: SimulationScenario) -> SimulationResult:
    world = SimulatedRun(scenario)
    await world.run()
    lead = scenario.pipeline_config.max_steps_ahead
    found = SimulationResult(
        dataflow=scenario.dataflow,
        workload=scenario.workload,
        max_staleness=scenario.placement.max_staleness,
        outcomes=world.outcomes,
        step_ends=world.step_ends,
        queue_depths=world.queue.queue_depths,
        spans_by_process=world.context.recordings.spans_by_process,
        process_names=world.process_names,
        crashes=world.crashes,
        first_step_ends=world.first_step_ends,
        warm_up_steps=0,
    )
    warm_up = lead + 1 + scenario.steps // 10
    counted = scenario.steps - warm_up - lead
    return found.exclude_steps(
        scenario.steps - lead - scenario.run_options.round_to_publish_every(counted), lead
    )
