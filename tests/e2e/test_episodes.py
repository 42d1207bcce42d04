"""Runs of episodes whose host process, or whose generator, is killed in the middle of them."""

import json
import os
import signal
from pathlib import Path

import pytest

from streamrl.buffer.books.ledger_audit import audit_run_log
from streamrl.buffer.books.run_log import read_history
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir
from tests.e2e.launched import Launched, events, rows
from tests.e2e.shared_runs import Ended

pytestmark = pytest.mark.xdist_group("episodes")
STEPS = 4
ENVIRONMENT = """
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
        return Turn("1+1", reward=float("1" in reply.text), done=self.num_turns == 3)
"""


LOGGED_ENVIRONMENT = """
import asyncio
import os
from pathlib import Path

from streamrl.environments import Turn


class Logged:
    def reset(self, row):
        self.num_turns = 0
        self.log("began")

    async def step(self, reply):
        self.num_turns += 1
        await asyncio.sleep(0.2)
        return Turn("1+1", reward=float("1" in reply.text), done=self.num_turns == 3)

    def score(self, episode):
        self.log("ended")
        return sum(episode.rewards)

    def log(self, event):
        with (Path(__file__).parent / "log").open("a") as file:
            file.write(f"{os.getpid()} {event}\\n")
"""


def launch(toy: Path, name: str, environment: str, *overrides: str) -> Launched:
    """Start a run with an environment, given as source."""
    path = toy / f"{name}.py"
    path.write_text(environment)
    words = ["train", str(toy / "recipe.yaml"), f"run.dir={toy}/runs", f"run.name={name}"]
    words += [f"environment={{path: {path}, max_turns: 3, max_tokens: 48}}"]
    # A digit ends a turn: the random model seldom samples EOS.
    words += ["generator.stop_token_ids=[3,4,5,6,7,8,9,10,11,12]"]
    return Launched([*words, *overrides], toy)


@pytest.fixture(scope="module")
def run(toy: Path) -> Ended:
    overrides = ["rewards=[{kind: environment}, {kind: length, weight: 0, of: sampled}]"]
    overrides += [f"run.steps={STEPS}", "pipeline.max_staleness=0", "placement.cpus=1"]
    run = launch(toy, "episodes", ENVIRONMENT, *overrides, "evaluation.every=4")
    code = run.wait()
    assert run.orphans() == []
    return Ended(code, run.output, toy / "runs" / "episodes")


def test_episodes_are_trained_after_their_host_was_killed(run: Ended):
    assert run.code == 0, run.output
    assert len(run.rows) == STEPS
    assert sum(row["episode/infra_errors"] for row in run.rows) > 0, "the killed host's episodes"
    account = audit_run_log(read_history(get_journal_dir(run.run_dir, RUN_LOG_FOLDER)))
    assert not account.problems
    assert len(account.trained) == len(set(account.trained)) == 4 * STEPS


def test_generator_and_trainer_agree_on_every_turn(run: Ended):
    # On policy: a difference of logprobs in any turn, or a token that shifted, would show here.
    for row in run.rows:
        assert row["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert row["policy/clip_frac"] == 0
        assert row["episode/turns"] > 2
        assert row["episode/observed_tokens"] > 3
        assert row["staleness/max"] == 0


def test_evaluation_runs_episodes_with_the_same_limits(run: Ended):
    assert 0 < run.rows[-1]["eval/mean_at_k"] < 3, "the rewards of three turns"


def test_recorded_rollouts_have_turns(run: Ended):
    lines = [
        json.loads(line)
        for file in (run.run_dir / "rollouts").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    rollouts = [rollout for line in lines for rollout in line["rollouts"]]
    sources = {turn["source"] for rollout in rollouts for turn in rollout["turns"]}
    assert sources == {"prompt", "sampled", "observation", "scaffold"}
    for rollout in rollouts:
        rewards = [turn["reward"] for turn in rollout["turns"] if turn["source"] == "sampled"]
        assert sum(rewards) == rollout["environment_score"] == rollout["score"]


@pytest.mark.slow
def test_a_killed_generator_leaves_no_host_and_every_prompt_is_trained_once(toy: Path):
    num_steps, run_dir = 12, toy / "runs" / "logged"
    overrides = ["rewards=[{kind: environment}]", f"run.steps={num_steps}", "queue.shards=1"]
    overrides += ["placement.mode=disaggregated", "placement.cpus=8", "evaluation.at_start=false"]
    run = launch(toy, "logged", LOGGED_ENVIRONMENT, *overrides)
    run.until(lambda: len(rows(run_dir)) >= 2)
    generator = run.actor("GeneratorActor")
    hosts = {process.pid for process in generator.children(recursive=True)}
    os.kill(generator.pid, signal.SIGKILL)
    run.until(lambda: not hosts & {process.pid for process in run.processes()})
    run.finish()
    assert [event["actor"] for event in events(run_dir, "restarted")] == ["generator-0"]
    lines = [line.split() for line in (toy / "log").read_text().splitlines()]
    interrupted = [event for pid, event in lines if int(pid) in hosts]
    assert interrupted.count("began") > interrupted.count("ended"), "killed in mid-episode"
    account = audit_run_log(read_history(get_journal_dir(run_dir, RUN_LOG_FOLDER)))
    assert not account.problems
    assert len(account.trained) == len(set(account.trained)) == 4 * num_steps
    assert not account.dropped
