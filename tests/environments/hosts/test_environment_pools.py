"""Pools of several environments, with real processes: routing, and a pool that does not start."""

import pytest

from streamrl.environments.config import EnvironmentConfig, EnvironmentSpec
from streamrl.environments.hosts.host_pool import start_pools
from streamrl.errors import ConfigError
from tests.descendants import descendants
from tests.environments.hosts.user_files import GUESS


@pytest.fixture
def start(tmp_path):
    async def start_named(**sources):
        named = {}
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
            named[name] = EnvironmentSpec(path=str(tmp_path / f"{name}.py"))
        return await start_pools(EnvironmentConfig(named=named, processes=1))

    return start_named


async def test_a_class_that_cannot_be_used_is_named_by_its_setting_and_closes_all_pools(start):
    before = descendants()
    with pytest.raises(ConfigError, match=r"^environment.named.broken.path=.*no public method"):
        await start(guess=GUESS, broken="class A: pass")
    assert not descendants() - before
