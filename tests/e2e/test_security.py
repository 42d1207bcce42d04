"""The demo as others on its machine found it: nobody without the token was let in."""

import pytest

from tests.e2e.outside import AGENT, CALLS, OBJECTS, Outside
from tests.e2e.shared_runs import Ended

pytestmark = pytest.mark.xdist_group("demo")


@pytest.fixture
def outside(demo: Ended) -> Outside:
    assert demo.outside is not None
    return demo.outside


def test_nothing_of_a_run_listens_beyond_the_loopback_device(outside: Outside) -> None:
    named = {name for _, name in outside.places}
    for part in ("gcs_server", "raylet", "Agent", "ShardActor", "Trainer", "Generator"):
        assert any(part in name for name in named), named
    assert [place for place in outside.places if not place[0].startswith("127.0.0.1:")] == []


def test_every_server_of_ray_answers_only_who_has_the_token(outside: Outside) -> None:
    denied = ("UNAUTHENTICATED", "UNAUTHENTICATED")
    wanted = dict.fromkeys(CALLS, (*denied, "OK"))
    wanted |= {OBJECTS: (*denied, ""), AGENT: ("401", "403", "200")}
    assert {call: set(said) for call, said in outside.answers.items()} == {
        call: {said} for call, said in wanted.items()
    }
    assert len(outside.answers[CALLS[-1]]) > 2, "each worker is a server"


def test_a_script_joins_a_run_with_its_token_and_with_no_other(outside: Outside) -> None:
    without, wrong, right = outside.joined
    assert right.code == 0 and "answer 42" in right.output, right.output
    for joined in (without, wrong):
        assert joined.code != 0 and "answer" not in joined.output
        assert "Authentication token is missing or incorrect" in joined.output, joined.output


def test_the_token_stands_in_no_command_line_log_or_file_of_the_run(
    demo: Ended, outside: Outside
) -> None:
    assert len(outside.token) == 64
    assert len(outside.commands) > 8
    assert not [command for command in outside.commands if outside.token in command]
    assert outside.token not in demo.output
    written = [
        path
        for folder in (outside.logs, demo.run_dir)
        for path in folder.rglob("*")
        if path.is_file()
    ]
    assert len(written) > 20
    token = outside.token.encode()
    assert not [path for path in written if token in path.read_bytes()]
    assert outside.logs.parents[2].stat().st_mode & 0o077 == 0, "others may not read the logs"
