"""Access to the demo from other processes of its machine: none without the token."""

import pytest

from tests.e2e.outside import AGENT, CALLS, OBJECTS, Outside
from tests.e2e.shared_runs import Ended

pytestmark = pytest.mark.xdist_group("demo")


@pytest.fixture
def outside(demo: Ended) -> Outside:
    assert demo.outside is not None
    return demo.outside


def test_a_run_listens_on_the_loopback_device_only(outside: Outside):
    names = {name for _, name in outside.servers}
    for part in ("gcs_server", "raylet", "Agent", "ShardActor", "Trainer", "Generator"):
        assert any(part in name for name in names), names
    assert all(address.startswith("127.0.0.1:") for address, _ in outside.servers)


def test_every_server_of_ray_requires_the_token(outside: Outside):
    denied = ("UNAUTHENTICATED", "UNAUTHENTICATED")
    expected = {call: {(*denied, "OK")} for call in CALLS}
    expected |= {OBJECTS: {(*denied, "")}, AGENT: {("401", "403", "200")}}
    assert {call: set(statuses) for call, statuses in outside.statuses.items()} == expected
    assert len(outside.statuses[CALLS[-1]]) > 2, "each worker is a server"


def test_a_script_joins_the_cluster_only_with_the_runs_token(outside: Outside):
    without, wrong, right = outside.joined
    assert right[0] == 0 and "answer 42" in right[1], right
    for code, output in (without, wrong):
        assert code != 0 and "answer" not in output
        assert "Authentication token is missing or incorrect" in output, output


def test_no_command_line_log_or_file_contains_the_token(demo: Ended, outside: Outside):
    assert len(outside.token) == 64
    assert len(outside.commands) > 8
    assert not [command for command in outside.commands if outside.token in command]
    assert outside.token not in demo.output
    paths = [*outside.logs.rglob("*"), *demo.run_dir.rglob("*")]
    written = [path for path in paths if path.is_file()]
    assert len(written) > 20
    token = outside.token.encode()
    assert not [path for path in written if token in path.read_bytes()]
    assert outside.logs.parents[2].stat().st_mode & 0o077 == 0, "others may not read the logs"
