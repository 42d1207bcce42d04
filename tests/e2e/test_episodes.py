"""A colocated run of episodes whose host process is killed in the middle of them."""

import json
from pathlib import Path

import pytest

from streamrl.buffer.books.ledger_audit import audit_run_log
from streamrl.buffer.books.run_log import read_history
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir
from tests.e2e.launched import Launched
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


@pytest.fixture(scope="module")
def run(toy: Path) -> Ended:
    (toy / "thrice.py").write_text(ENVIRONMENT)
    words = ["train", str(toy / "recipe.yaml"), f"run.dir={toy}/runs", "run.name=episodes"]
    words += [f"environment={{path: {toy}/thrice.py, max_turns: 3, max_tokens: 48}}"]
    words += ["rewards=[{kind: environment}, {kind: length, weight: 0, of: sampled}]"]
    # A digit ends a turn: the random model seldom samples EOS.
    words += ["generator.stop_token_ids=[3,4,5,6,7,8,9,10,11,12]"]
    words += [f"run.steps={STEPS}", "pipeline.max_staleness=0", "placement.cpus=1"]
    run = Launched([*words, "evaluation.every=4"], toy)
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
