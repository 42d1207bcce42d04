"""Sessions of hosts in this process."""

import pytest

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.hosts.environment_host import EnvironmentHost
from tests.descendants import descendants
from tests.environments.hosts.open_session import OpenSession


@pytest.fixture
async def open_session(tmp_path):
    """Open sessions, those of a source in one host; in the end close them: no process is left."""
    before, sessions = descendants(), []
    hosts: dict[tuple[str, str], EnvironmentHost] = {}

    def open_in_host(source="", **settings):
        key = source, str(settings)
        if key not in hosts:
            path = tmp_path / f"environment_{len(hosts)}.py"
            path.write_text(source)
            hosts[key] = EnvironmentHost(EnvironmentConfig(str(path) if source else "", **settings))
        sessions.append(OpenSession(hosts[key]))
        return sessions[-1]

    yield open_in_host
    for session in sessions:
        await session.close()
    assert not descendants() - before
