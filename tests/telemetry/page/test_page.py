"""The page as a file and as served: what it contains, and whom it answers."""

import json
import re
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.cli.main import main
from streamrl.errors import ConfigError
from streamrl.telemetry.page import page as run_page_module
from streamrl.telemetry.page.page import (
    PageServer,
    RunPage,
    fill_template,
)
from streamrl.telemetry.page.run_record import RunReader
from streamrl.telemetry.rollout_log import RecordedGroup, RecordedRollout, RolloutLog
from tests.telemetry.page.recorded_run import write_run

ATTACK = "</script><script>alert(1)</script>"


def make_page(*folders: Path) -> RunPage:
    return RunPage([RunReader(folder) for folder in folders], lambda *_: ["bound by train"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run")
    group = RecordedGroup(2, "0:1:0", (RecordedRollout(ATTACK, 1.0),))
    RolloutLog(folder).write_groups(2, [group])
    return folder


def read_data(html: str) -> dict:
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL
    )
    return json.loads(text)


def test_a_file_holds_everything_and_asks_for_nothing(folder: Path) -> None:
    html = make_page(folder).render()
    data = read_data(html)
    (run,) = data["runs"]
    assert run["rollouts"]["2"][0]["rollouts"][0]["completion"] == ATTACK and ATTACK not in html
    assert [chart["chart_id"] for chart in run["charts"]][:2] == ["solved", "queue"]
    assert run["advice"] == ["bound by train"]
    assert list(run["rollouts"]) == ["2"]
    assert data["followEvery"] == 0
    head = html[: html.index("<script>")]
    assert "src=" not in head
    assert "default-src 'none'" in head


HOSTILE = st.sampled_from(
    ["</script>", "<!--", "<script>", "]]>", "\\", '"', "\u2028", "\ud800", "\x00", "@DATA@"]
)


@given(st.lists(HOSTILE | st.text(st.characters()), max_size=4).map("".join))
def test_no_text_of_a_run_changes_the_page(text: str) -> None:
    empty, full = (fill_template(value, "") for value in ("", text))
    assert full.count("<") == empty.count("<")
    assert read_data(full) == text


def test_text_enters_the_document_only_as_text() -> None:
    folder = Path(run_page_module.__file__).parent
    for name in ("page.js", "rollout_view.js"):
        script = (folder / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", script)


@contextmanager
def serve(page: RunPage) -> Iterator[PageServer]:
    server = PageServer(page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(10)


def test_the_server_answers_its_own_address(folder: Path) -> None:
    with serve(make_page(folder)) as server:
        address = urlsplit(server.address)
        base = f"http://{address.netloc}"
        token = {"token": server.token}
        assert read_data(httpx.get(server.address).text)["followEvery"] > 0
        data = httpx.get(f"{base}/data", params=token).json()
        assert data["runs"][0]["rolloutSteps"] == [2]
        assert data["runs"][0]["rollouts"] == {}
        groups = httpx.get(f"{base}/rollouts", params={**token, "run": "run", "step": "2"}).json()
        assert groups["groups"][0]["uid"] == "0:1:0"
        other = httpx.get(f"{base}/rollouts", params={**token, "run": "../run", "step": "2"})
        assert other.json() == {"groups": []}
        assert httpx.get(f"{base}/etc/passwd", params=token).status_code == 404


@pytest.mark.parametrize("token", ["", "wrong", None])
def test_the_server_refuses_a_request_without_its_token_or_name(
    folder: Path, token: str | None
) -> None:
    with serve(make_page(folder)) as server:
        base = server.address.partition("?")[0]
        for path in ("", "data", "rollouts"):
            params = {} if token is None else {"token": token}
            assert httpx.get(base + path, params=params).status_code == 403
        # Nor does it answer a page of another site whose name resolves to this machine.
        assert server.address.startswith("http://127.0.0.1:")
        reply = httpx.get(server.address, headers={"Host": "attacker.example"})
        assert reply.status_code == 403


def test_a_taken_port_is_refused(folder: Path) -> None:
    with serve(make_page(folder)) as server:
        port = urlsplit(server.address).port
        assert port
        with pytest.raises(ConfigError, match=f"--port {port}"):
            PageServer(make_page(folder), port=port)


def test_unchanged_runs_are_not_sent_again(folder: Path) -> None:
    with serve(make_page(folder)) as server:
        address, params = server.address.partition("?")[0] + "data", {"token": server.token}
        state = httpx.get(address, params=params).json()["state"]
        assert httpx.get(address, params={**params, "state": state}).status_code == 204
        with (folder / "events.jsonl").open("a") as file:
            file.write('{"time": 1000014.0, "event": "died", "actor": "shard-0"}\n')
        assert httpx.get(address, params={**params, "state": state}).json()["state"] != state


def test_a_closed_connection_and_a_bad_step_print_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve(make_page(folder)) as server:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
                # A reset, as when a tab is closed before it has read the page.
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                request = f"GET /?token={server.token} HTTP/1.1\r\nHost: localhost\r\n\r\n"
                connection.sendall(request.encode())
        base, params = server.address.partition("?")[0], {"token": server.token, "run": "run"}
        for step in ("9" * 5000, "-1", "\u0663", ""):
            reply = httpx.get(f"{base}rollouts", params={**params, "step": step})
            assert reply.status_code == 404
        assert httpx.get(server.address).status_code == 200
    assert capfd.readouterr().err == ""


def test_a_deleted_run_is_reported(folder: Path) -> None:
    with serve(make_page(folder)) as server:
        shutil.rmtree(folder)
        address = server.address.partition("?")[0] + "data"
        reply = httpx.get(address, params={"token": server.token})
        assert reply.status_code == 500 and "deleted" in reply.text


def test_runs_of_the_same_folder_name_are_told_apart(folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "elsewhere" / "run", num_steps=2)
    page = make_page(folder, other)
    names = [run["name"] for run in page.describe()["runs"]]
    assert names == [str(folder), str(other)]
    assert [run["tiles"][0]["value"] for run in page.describe()["runs"]] == ["6", "2"]
    groups = page.describe_rollouts(names[0], 2)
    assert groups and groups["groups"]
    assert page.describe_rollouts("run", 2) is None
    with pytest.raises(ConfigError, match="given twice"):
        make_page(folder, folder / ".." / "run")


def test_rollouts_of_a_file_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(3, 30):
        group = RecordedGroup(step, f"0:{step}:0", (RecordedRollout("x" * 100, 1.0),))
        RolloutLog(folder).write_groups(step, [group])
    monkeypatch.setattr(run_page_module, "MAX_ROLLOUT_BYTES", 5000)
    (run,) = make_page(folder).describe(with_rollouts=True)["runs"]
    shown = list(map(int, run["rollouts"]))
    assert shown == sorted(shown) and shown[-1] == 29 and 2 < len(shown) < 28
    assert len(json.dumps(run["rollouts"])) <= 5000


def test_the_command_writes_a_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, file = write_run(tmp_path / "other"), tmp_path / "page.html"
    assert main(["report", str(folder), str(other), "--html", str(file)]) == 0
    assert [run["name"] for run in read_data(file.read_text())["runs"]] == ["run", "other"]
    assert str(file) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["view", "{folder}", "--port", "70000"], "--port 70000"),
        (["report", "{folder}", "--html", "{folder}"], "not a file"),
        (["report", "{folder}", "{folder}"], "--html"),
        (["report", "{folder}", "--html", "{folder}/metrics.jsonl"], "no HTML page"),
        (["report", "{folder}", "--json", "--html", "page.html"], "--html"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(folder=folder) for word in words]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert problem in printed.err
