"""The driver on real host processes whose environment hangs, blocks or dies."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes import driver as driver_module
from streamrl.environments.episodes.driver import derive_attempt_seed
from streamrl.environments.hosts.host_pool import EnvironmentHostPool
from streamrl.errors import EpisodeTimeoutError
from streamrl.messages import Prompt
from tests.descendants import descendants
from tests.environments.episodes.scripted import ScriptedSampler, make_driver, run_group
from tests.environments.hosts.user_files import COMMANDS

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory):
    """Pool of a process that runs the commands of the policy and of the row."""
    before, path = descendants(), tmp_path_factory.mktemp("environment") / "commands.py"
    path.write_text(COMMANDS)
    settings = EnvironmentConfig(f"{path}:Commands", processes=1, turn_timeout_s=2.0)
    hosts = EnvironmentHostPool(settings)
    await hosts.start()
    yield hosts
    await hosts.close()
    assert not descendants() - before


def make_prompt(**commands):
    messages = [{"role": "user", "content": "?"}]
    return Prompt("0:0:0", np.array([ord("?")], np.int32), messages, extra_info=commands)


def start_driver(pool, write, **limits):
    values = {"attempts": 2, "max_turns": 1, "max_turn_tokens": 256, "max_tokens": 4096}
    return make_driver(ScriptedSampler(write), pool, **{**values, **limits})


async def test_episodes_of_a_hanging_environment_are_tried_again_and_have_no_reward(
    pool, monkeypatch
):
    monkeypatch.setattr(driver_module, "RETRY_DELAY_S", 0.01)
    # The second episode of each group hangs in its step, at both attempts.
    hanging = {1, derive_attempt_seed(1, 2)}
    driver = start_driver(pool, lambda context, seed: "await 600;" if seed in hanging else "go;")
    outcomes: Sequence[Any] = await asyncio.gather(
        run_group(driver, prompt=make_prompt(reset="hang")),
        run_group(driver, prompt=make_prompt(score="hang")),
        run_group(driver, prompt=make_prompt(), seeds=(0, 1)),
        run_group(driver, prompt=make_prompt(close="hang")),
        return_exceptions=True,
    )
    reset, score, step, close = outcomes
    for error, method in ((reset, "reset"), (score, "score"), (step, "step")):
        assert isinstance(error, EpisodeTimeoutError), error
        assert f"Commands.{method} in " in str(error) and "no result in 2 s" in str(error)
    assert close["environment_scores"].tolist() == [0.5], "the episode had ended"
    assert driver.meter.drain_counts()["episode/infra_errors"] == 2 * 3
    assert pool.num_claims == 0
