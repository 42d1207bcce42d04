"""Runs of episodes: their turns are read from the trace, and predict the run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from streamrl.config.run_config import RunConfig
from streamrl.errors import ConfigError
from streamrl.planner.calibration.advice import (
    describe_run,
    measure_episodes,
    recommend_settings,
    report_to_json,
)
from streamrl.planner.calibration.fit_timings import fit_timings
from streamrl.planner.calibration.prediction import PlannedRun, SteadyMetrics, predict_metrics
from streamrl.planner.calibration.run_trace import (
    RecordedEpisodes,
    RunTrace,
    collect_turns,
    load_run_trace,
    split_episodes,
)
from streamrl.planner.problem.stage_timings import StageTimings
from streamrl.planner.problem.workload import EpisodeTurns, EpisodeWork, TurnWork
from streamrl.telemetry.spans import Span, SpanArgValue
from tests.planner.calibration.runs import TRUE, play, recipe, write_run

EPISODES = EpisodeTurns(
    (
        EpisodeWork((TurnWork(0.1, 0, 3), TurnWork(0.4, 5, 6), TurnWork(0.8, 5, 2)), 0.6),
        EpisodeWork((TurnWork(0.1, 0, 8), TurnWork(1.2, 4, 9)), 0.6),
        EpisodeWork((TurnWork(0.1, 0, 5),), 0.6),
        EpisodeWork((TurnWork(0.1, 0, 12), TurnWork(0.5, 6, 4)), 0.6),
    )
)
SHARES = {"decode_frac": 0.2, "wait_frac": 0.1, "environment_frac": 0.7}
MEANS = {
    "turns": 2.0,
    "calls": 1.0,
    "sampled_tokens": 12.2,
    "environment_s": EPISODES.mean_environment_s,
}


def make_config(folder: Path, *overrides: str) -> RunConfig:
    environment = f"environment={{path: {folder}/game.py, max_turns: 3, max_tokens: 60}}"
    words = ("rewards=[{kind: environment}]", "pipeline.groups_per_step=4", *overrides)
    return recipe(folder, environment, *words)


def make_run(folder: Path, name: str, *overrides: str) -> RunTrace:
    config = make_config(folder, *overrides)
    metrics = {f"episode/{key}": value for key, value in {**SHARES, **MEANS}.items()}
    simulated = play(config, TRUE, steps=10, episodes=EPISODES)
    return load_run_trace(write_run(folder / name, config, simulated, metrics))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> RunTrace:
    return make_run(tmp_path_factory.mktemp("run"), "run", "pipeline.max_staleness=0")


@pytest.fixture(scope="module")
def timings(trace: RunTrace) -> StageTimings:
    return fit_timings(trace, PlannedRun.from_trace(trace, trace.config).base_timings).timings


def test_turns_tokens_and_environment_times_are_read_from_the_trace(trace: RunTrace):
    def round_episode(episode: EpisodeWork) -> EpisodeWork:
        """Round times: the difference of two sums has an error."""
        turns = tuple(t._replace(environment_s=round(t.environment_s, 3)) for t in episode.turns)
        return EpisodeWork(turns, 0.0)

    assert trace.episode_turns is not None
    found = trace.episode_turns.episodes
    assert {round_episode(e) for e in found} == {round_episode(e) for e in EPISODES.episodes}
    # The time after the last turn is the rest of the mean time.
    recorded_s = sum(e.environment_s - e.final_s for e in found) / len(found)
    assert found[0].final_s == pytest.approx(EPISODES.mean_environment_s - recorded_s)
    assert trace.mean_prompt_tokens == 7
    lengths = {tokens for group in trace.generated_groups for tokens in group.lengths}
    assert lengths == set(EPISODES.lengths.samples)
    assert len(trace.engine_requests) > 1.5 * 4 * len(trace.generated_groups)


@pytest.mark.parametrize(
    "settings",
    [
        ("pipeline.max_staleness=1",),
        ("pipeline.max_staleness=0", "environment.open_episodes=4"),
    ],
)
def test_a_run_of_episodes_predicts_another(
    trace: RunTrace, timings: StageTimings, tmp_path: Path, settings: Sequence[str]
):
    target = make_run(tmp_path, "target", *settings)
    planned = PlannedRun.from_trace(trace, target.config)
    predicted = predict_metrics(planned, timings)
    errors = predicted.compare_with(SteadyMetrics.from_run(target))
    assert abs(errors["step_s"]["error"]) < 0.12, errors
    assert abs(errors["idle/generate"]["error"]) < 0.12, errors


def test_too_few_open_episodes_are_reported_with_the_number_that_fills_the_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = ("environment.open_episodes=4", "generator.max_concurrent_rollouts=4")
    trace = make_run(tmp_path, "run", "pipeline.max_staleness=0", *words)
    load = measure_episodes(trace)
    assert load is not None
    # 4 * (1 + 0.7 / 0.2) = 18, but a step has 16 episodes.
    assert (load["needed_open"], load["max_open"]) == (16, 4)
    lines = describe_run(trace)
    start = lines.index(next(line for line in lines if line.startswith("episodes ")))
    assert lines[start].startswith("episodes    2 turns, 1 calls, 12.2 sampled tokens; of their ")
    assert "20% sampling, 10% waiting for a slot or the devices, 70% waiting for" in lines[start]
    assert "environment.open_episodes=16 keep more of its 4 decode slots" in lines[start + 1]
    assert report_to_json(trace)["episodes"]["needed_open"] == 16
    monkeypatch.setattr("streamrl.planner.calibration.advice.list_alternatives", lambda config: [])
    (option,) = recommend_settings(trace).options
    assert option.settings == ("environment.open_episodes=16",)
    assert option.step_s_change < -0.2


def test_a_run_without_environment_time_is_refused(tmp_path: Path):
    config = make_config(tmp_path, "pipeline.max_staleness=0")
    simulated = play(config, TRUE, steps=9, episodes=EPISODES)
    run_dir = write_run(tmp_path / "run", config, simulated)
    with pytest.raises(ConfigError, match="has no episode/environment_s"):
        load_run_trace(run_dir)


def make_span(turn: int, start_s: float, end_s: float, tokens: int | str = 3, **facts: int) -> Span:
    context = 10 + 8 * turn
    args: dict[str, SpanArgValue] = {"uid": "0:0:0", "episode": 1, "turn": turn}
    args |= {"context": context, "environment_s": 1.0, "tokens": tokens, **facts}
    return Span("generator-0", "generate", 0, start_s, end_s, args)


def collect(spans: Sequence[Span]) -> list[tuple[tuple[float, float], ...]]:
    return [turn.intervals for turn in collect_turns(spans, {}, since=0.0)]


def test_a_paused_turn_has_several_intervals():
    spans = [make_span(0, 1.0, 2.0, ""), make_span(0, 3.0, 4.0), make_span(1, 5.0, 6.0)]
    assert collect(spans) == [((1.0, 2.0), (3.0, 4.0)), ((5.0, 6.0),)]
    assert collect(spans[:1]) == [], "a turn that was cut off at the end of the trace"


def test_an_episode_that_was_run_again_counts_once():
    starts = [(0, 1.0), (1, 3.0), (0, 5.0), (1, 7.0), (2, 9.0)]
    turns = collect_turns([make_span(turn, at, at + 1) for turn, at in starts], {}, since=0.0)
    (episode,) = split_episodes(turns).values()
    assert [turn.start_s for turn in episode] == [5.0, 7.0, 9.0]


def test_a_group_counts_once_all_of_its_episodes_have_ended():
    turns = collect_turns(
        [make_span(0, 1.0, 2.0), make_span(0, 1.0, 2.0, episode=2)], {}, since=0.0
    )

    def count(ended: set[str], group_size: int) -> int:
        recorded = RecordedEpisodes.from_turns(
            turns, ended=ended, group_size=group_size, environment_s=3.0
        )
        return len(recorded.groups)

    assert [count({"0:0:0"}, 2), count(set(), 2), count({"0:0:0"}, 3)] == [1, 0, 0]


def test_a_load_of_weights_between_two_turns_drops_the_cached_tokens():
    spans = [make_span(turn, 3.0 * turn, 3.0 * turn + 1) for turn in range(3)]
    pull = Span("generator-0", "pull", 0, 4.2, 4.5, {"version": 1})
    groups = collect_turns([*spans, pull], {}, since=0.0)
    # The first turn has no cache, the second that of the first; the third follows the load.
    assert [group.cached_tokens for group in groups] == [0, 13, 0]
