"""A placement's run in virtual time."""

from streamrl.dataflow import Dataflow, Kind
from streamrl.engines.memory.gc_paused import uncollected
from streamrl.errors import ConfigError
from streamrl.placement.placements import MOST_STALENESS, Placement
from streamrl.placement.run_options import Manner
from streamrl.placement.stage_timings import Timings
from streamrl.placement.workload import Workload
from streamrl.simulator.replicas.failures import Failures
from streamrl.simulator.replicas.virtual_loop import run_virtual
from streamrl.simulator.results import Simulated
from streamrl.simulator.scenario import Scenario
from streamrl.simulator.world import World


def simulate(  # noqa: PLR0913
    dataflow: Dataflow,
    placement: Placement,
    timings: Timings,
    workload: Workload,
    *,
    steps: int,
    seed: int,
    failures: Failures | None = None,
    manner: Manner | None = None,
) -> Simulated:
    """What a run of so many steps would do; the same for the same seed.

    Raises ConfigError for what no run could be: stages without timings, completions that fit no
    micro-batch or no generator.
    """
    manner = manner or Manner()
    check_timings(dataflow, timings)
    check_workload(workload, timings, steps)
    if manner.on_stale == "drop" and not placement.streamed:
        raise ConfigError(
            "on_stale=drop: not with a placement that is not streamed: steps are whole"
        )
    lead = manner.lead(placement.max_staleness)
    if lead > MOST_STALENESS:
        raise ConfigError(f"depth={lead}: steps ahead: must be at most {MOST_STALENESS}")
    if manner.publish_every > lead + 1:
        raise ConfigError(
            f"publish_every={manner.publish_every}: with generation {lead} steps ahead nobody would"
            f" sample what is to be trained next; must be at most {lead + 1}"
        )
    scenario = Scenario(dataflow, placement, timings, workload, steps, seed, manner, failures)
    with uncollected():
        return run_virtual(_run(scenario), polls=False)


def check_timings(dataflow: Dataflow, timings: Timings) -> None:
    """Raise ConfigError if a stage that scores or a role that is trained has none."""
    for call in dataflow.of_kind(Kind.SCORE):
        if call.stage not in timings.score:
            raise ConfigError(f"timings.score.{call.stage}: missing")
    for role in dataflow.trained:
        if role not in timings.train:
            raise ConfigError(f"timings.train.{role}: missing")


def check_workload(workload: Workload, timings: Timings, steps: int) -> None:
    """Raise ConfigError if it is none, or its longest rollout has no room."""
    if steps < 1:
        raise ConfigError(f"steps={steps}: must be at least 1")
    workload.check_room()
    longest = workload.whole_prompt_tokens + workload.lengths.most
    if timings.generator.kv_tokens < longest:
        raise ConfigError(
            f"timings.generator.kv_tokens={timings.generator.kv_tokens:g}: must be at least"
            f" {longest}, the tokens of a prompt and its longest completion"
        )


async def _run(scenario: Scenario) -> Simulated:
    world = World(scenario)
    await world.run()
    lead = scenario.pipeline.lead
    found = Simulated(
        dataflow=scenario.dataflow,
        workload=scenario.workload,
        max_staleness=scenario.placement.max_staleness,
        outcomes=world.outcomes,
        step_ends=world.step_ends,
        depths=world.queue.depths,
        by_process=world.site.recording.spans,
        processes=world.processes,
        crashes=world.crashes,
        first_ends=world.first_ends,
        warm_up=0,
    )
    warm_up = lead + 1 + scenario.steps // 10
    counted = scenario.steps - warm_up - lead
    return found.without(scenario.steps - lead - scenario.manner.whole_turns(counted), lead)
