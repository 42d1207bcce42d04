"""A colocated run of two environments, with credit by turn; a host process is killed."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from streamrl.telemetry.rollout_log import SAMPLED, RecordedTurn, read_recorded_groups
from tests.e2e.launched import audit, train
from tests.e2e.shared_runs import Ended

pytestmark = pytest.mark.xdist_group("episodes")
STEPS = 4
ENVIRONMENTS = '''
import asyncio
import os
import signal
from pathlib import Path

from streamrl.environments import Turn


class Thrice:
    def reset(self, row, seed):
        self.num_turns = 0
        return f" {seed % 10}"

    async def step(self, reply):
        self.num_turns += 1
        if self.num_turns == 2:
            try:
                (Path(__file__).parent / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        await asyncio.sleep(0.05)
        is_odd = any(digit in reply.text for digit in "13579")
        return Turn("1+1", reward=float(is_odd), done=self.num_turns == 3)

    async def state_key(self):
        return self.num_turns


class Adder:
    def __init__(self, score):
        self._score = score

    def add(self, digit: int) -> str:
        """Add one."""
        return f"{digit}+1"

    def state_key(self):
        return "only"

    def score(self, episode):
        return self._score
'''
NAMED = "{{thrice: {{path: {0}:Thrice}}, adder: {{path: {0}:Adder, options: {{score: 0.5}}}}}}"
# Low digits are calls, and any other text is an answer.
# The template shows the opening "=" of the last turn only: the second turn begins a new sample.
LIMITS = "max_tokens: 48, max_samples: 2"
FORMAT = "call_format: regex, call_pattern: '(?P<digit>[0-4])'"


@pytest.fixture(scope="module")
def run(toy: Path) -> Ended:
    (toy / "mine.py").write_text(ENVIRONMENTS)
    rows = [json.loads(line) for line in (toy / "rows.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        row["environment"] = row["data_source"] = ("thrice", "adder")[i % 2]
    (toy / "named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"data.{key}={toy}/named.jsonl" for key in ("train", "eval")]
    named = NAMED.format(toy / "mine.py")
    words += [f"environment={{named: {named}, max_turns: 3, {LIMITS}, {FORMAT}}}"]
    words += ["rewards=[{kind: environment}, {kind: length, weight: 0, of: sampled}]"]
    # A digit ends a turn: the random model seldom samples EOS.
    words += ["generator.stop_token_ids=[3,4,5,6,7,8,9,10,11,12]"]
    words += ["algorithm.name=gigpo", "algorithm.loss_aggregation=turn-mean"]
    words += [f"run.steps={STEPS}", "pipeline.max_staleness=0", "placement.cpus=1"]
    run, run_dir = train(toy, "episodes", *words, "evaluation.every=4")
    code = run.wait()
    assert run.orphans() == []
    return Ended(code, run.output, run_dir)


def test_episodes_are_trained_after_their_host_was_killed(run: Ended):
    assert run.code == 0, run.output
    assert len(run.rows) == STEPS
    assert sum(row["episode/infra_errors"] for row in run.rows) > 0, "the killed host's episodes"
    assert len(audit(run.run_dir).trained) == 4 * STEPS


def test_generator_and_trainer_agree_on_every_turn(run: Ended):
    # On policy: a difference of logprobs in any turn, or a token that shifted, would show here.
    for row in run.rows:
        assert row["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert row["policy/clip_frac"] == 0
        assert 1 < row["episode/samples"] < row["episode/turns"] <= 3
        assert row["episode/observed_tokens"] > 0
        assert row["staleness/max"] == 0


def test_evaluation_runs_episodes_of_both_environments_with_the_same_limits(run: Ended):
    row = run.rows[-1]
    assert 0 < row["eval/source/thrice/mean_at_k"] < 3, "the rewards of three turns"
    assert row["eval/source/adder/mean_at_k"] == 0.5
    assert 1 < row["eval/turns"] <= 3
    assert row["eval/source/thrice/calls"] == 0 < row["eval/source/adder/calls"]
    assert row["eval/timeout_frac"] == row["eval/malformed_frac"] == 0


def test_recorded_rollouts_have_the_turns_and_rewards_of_their_environment(run: Ended):
    outcomes, sources = defaultdict[str, set[str | None]](set), set[str]()
    for step in range(1, STEPS + 1):
        for group in read_recorded_groups(run.run_dir, step):
            for rollout in group.rollouts:
                turns = [turn for turn in rollout.turns if turn.source == SAMPLED]
                outcomes[group.environment] |= {turn.outcome for turn in turns}
                sources |= {turn.source for turn in rollout.turns}
                assert rollout.environment_score == rollout.score
                expected = 0.5 if group.environment == "adder" else sum_rewards(turns)
                assert rollout.score == expected
                falls = [score for turn in turns for _, score in turn.scores]
                # The score of the adder falls on the last token, as any score without parts.
                rewards = [turn.reward for turn in turns if turn.reward]
                assert falls == ([] if group.environment == "adder" else rewards)
                assert all(i == (turn.tokens or 0) - 1 for turn in turns for i, _ in turn.scores)
    assert outcomes == {"thrice": {"spoke"}, "adder": {"spoke", "called"}}
    assert sources == {"prompt", "sampled", "observation", "scaffold"}


def sum_rewards(turns: Sequence[RecordedTurn]) -> float:
    return sum(turn.reward or 0.0 for turn in turns)
