"""A run whose generator is killed while its episodes wait for their environment."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.launched import audit, events, rows, train

pytestmark = pytest.mark.slow
STEPS = 12
ENVIRONMENT = """
import asyncio
import os
from pathlib import Path

from streamrl.environments import Turn


class Logged:
    def reset(self, row):
        self.num_turns = 0
        self._log("began")

    async def step(self, reply):
        self.num_turns += 1
        await asyncio.sleep(0.2)
        return Turn("1+1", reward=float("1" in reply.text), done=self.num_turns == 3)

    def score(self, episode):
        self._log("ended")
        return sum(episode.rewards)

    def _log(self, event):
        with (Path(__file__).parent / "log").open("a") as file:
            file.write(f"{os.getpid()} {event}\\n")
"""


def test_a_killed_generator_leaves_no_host_and_every_prompt_is_trained_once(toy: Path):
    (toy / "logged.py").write_text(ENVIRONMENT)
    words = [f"environment={{path: {toy}/logged.py, max_turns: 3, max_tokens: 48}}"]
    # A digit ends a turn: the random model seldom samples EOS.
    words += ["generator.stop_token_ids=[3,4,5,6,7,8,9,10,11,12]"]
    words += ["rewards=[{kind: environment}]", f"run.steps={STEPS}"]
    words += ["placement.mode=disaggregated", "placement.cpus=8", "evaluation.at_start=false"]
    run, run_dir = train(toy, "logged", *words)
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
    account = audit(run_dir)
    assert len(account.trained) == 4 * STEPS
    assert not account.dropped
