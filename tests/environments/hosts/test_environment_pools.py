"""Pools of several environments, with real processes: routing, and a pool that does not start."""

import numpy as np
import pytest

from streamrl.environments.config import EnvironmentConfig, EnvironmentSpec
from streamrl.environments.hosts.host_pool import close_pools, start_pools
from streamrl.errors import ConfigError
from streamrl.messages import Prompt
from tests.descendants import descendants
from tests.environments.hosts.user_files import CALCULATOR, GUESS


@pytest.fixture
def start(tmp_path):
    async def start_named(**sources):
        named = {}
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
            named[name] = EnvironmentSpec(path=str(tmp_path / f"{name}.py"))
        return await start_pools(EnvironmentConfig(named=named, processes=1))

    return start_named


async def test_the_environment_of_the_prompt_serves_its_episodes(start):
    before = descendants()
    pools = await start(guess=GUESS, calculator=CALCULATOR)
    assert [len(pool.description.tools) for pool in pools.values()] == [0, 1]
    for name, num_messages, num_tools in (("guess", 1, 0), ("calculator", 0, 1)):
        prompt = Prompt("u", np.zeros(1, np.int32), environment=name)
        session = pools[name].open_session(prompt, seed=0)
        start = await session.reset()
        assert (len(start.messages), len(start.tools)) == (num_messages, num_tools)
        await session.close()
    await close_pools(pools)
    assert not descendants() - before


async def test_a_class_that_cannot_be_used_is_named_by_its_setting_and_closes_all_pools(start):
    before = descendants()
    with pytest.raises(ConfigError, match=r"^environment.named.broken.path=.*no public method"):
        await start(guess=GUESS, broken="class A: pass")
    assert not descendants() - before
