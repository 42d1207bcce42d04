"""A run as others on its machine find it: what listens where, and who is let in."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil

from tests.e2e.launched import Launched

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
#: Harmless calls of each kind of Ray's servers, of which a server knows one.
CALLS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "NodeManagerService/GetNodeStats",
    "CoreWorkerService/GetCoreWorkerStats",
)
#: Of the server of objects, which has no harmless one: it is asked without the token alone.
OBJECTS = "ObjectManagerService/Push"
AGENT = "get_runtime_envs_info"
ANSWER_S = 5.0
JOIN = """
import sys
import ray

ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
print("answer", ray.get(ray.remote(num_cpus=0)(lambda: 6 * 7).remote(), timeout=60))
"""


@dataclass(frozen=True)
class Joined:
    """What came of a script that tried to join."""

    code: int
    output: str


@dataclass(frozen=True)
class Outside:
    """A run that is under way.

    commands, places: of its processes, and each address that is listened at, with whose it is.
    answers: by what is asked of a server of Ray, what it says to a caller without a token, with a
        wrong one, and with the run's own.
    joined: what came of a script without a token, with a wrong one, and with the run's own.
    """

    token: str
    logs: Path
    commands: list[str]
    places: list[tuple[str, str]]
    answers: dict[str, list[tuple[str, str, str]]]
    joined: tuple[Joined, Joined, Joined]


def look_at(run: Launched) -> Outside:
    """Look at a run whose actors have started."""
    told = told_on_the_page(run.process.pid)
    token, address = told["RAY_AUTH_TOKEN"], told["--gcs-address"]
    tokens = ("", "0" * len(token), token)
    # Some of Ray write their title over their environment, where the mark of the run was.
    beneath = psutil.Process(run.process.pid).children(recursive=True)
    processes = list({*run.processes(), *beneath})
    joining = [start_script(address, token) for token in tokens]
    places = [(place, name_of(one)) for one in processes for place in listening(one)]
    answers: dict[str, list[tuple[str, str, str]]] = {}
    # Ranks and generators have ports of torch.distributed besides, which are no servers to talk to.
    talking = [one for one in places if not re.search("Trainer|Generator|Hybrid", one[1])]
    for place, _ in talking:
        for what, said in answers_of(place, tokens):
            answers.setdefault(what, []).append(said)
    first, second, third = map(end_of, joining)
    return Outside(
        token=token,
        logs=Path(told["--log_dir"]),
        commands=[" ".join(one.cmdline()) for one in processes],
        places=places,
        answers=answers,
        joined=(first, second, third),
    )


def told_on_the_page(pid: int) -> dict[str, str]:
    """What the page's commands say of the run with this process, and the options of its raylet."""
    (block,) = re.findall(r"^```\n(tr .*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        ["bash", "-ec", re.sub(r"\bPID\b", str(pid), block)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    raylet = subprocess.run(
        ["pgrep", "-a", "-P", str(pid), "raylet"], capture_output=True, text=True, check=True
    )
    words = [*done.stdout.split(), *raylet.stdout.split()]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def name_of(process: psutil.Process) -> str:
    """What a process calls itself."""
    return " ".join(process.cmdline()[:1]) or process.name()


def listening(process: psutil.Process) -> list[str]:
    """Each address and port that a process listens at."""
    try:
        found = process.net_connections(kind="inet")
    except psutil.Error:
        return []
    # Servers of gRPC write an address of IPv4 as one of IPv6.
    return [
        f"{one.laddr.ip.removeprefix('::ffff:')}:{one.laddr.port}"
        for one in found
        if one.status == psutil.CONN_LISTEN
    ]


def answers_of(place: str, tokens: Sequence[str]) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """What a server at an address says to each of these tokens, if it is one of Ray's."""
    for call in CALLS:
        said = [ask(place, call, token) for token in tokens]
        if said[-1] == "OK":
            first, second, third = said
            yield call, (first, second, third)
            return
        if "UNAVAILABLE" in said:
            break
    else:
        first, second = (ask(place, OBJECTS, token) for token in tokens[:-1])
        yield OBJECTS, (first, second, "")
        return
    said = [post(place, token) for token in tokens]
    if said[-1] == "200":
        first, second, third = said
        yield AGENT, (first, second, third)


def ask(place: str, call: str, token: str) -> str:
    """The status of a call, made without Ray."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(place) as channel:
        method = channel.unary_unary(f"/ray.rpc.{call}")
        try:
            method(b"", timeout=ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def post(place: str, token: str) -> str:
    """The status of a request to an agent of Ray, which speaks HTTP."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        reply = httpx.post(f"http://{place}/{AGENT}", headers=headers, timeout=ANSWER_S)
    except httpx.HTTPError as error:
        return type(error).__name__
    return str(reply.status_code)


def start_script(address: str, token: str) -> "subprocess.Popen[str]":
    """Start a script beside the run that joins its Ray with a token."""
    around = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    around["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if token:
        around |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    return subprocess.Popen(
        [sys.executable, "-c", JOIN, address],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=around,
        cwd="/",
    )


def end_of(script: "subprocess.Popen[str]") -> Joined:
    """Wait for a script."""
    output, _ = script.communicate(timeout=180)
    return Joined(script.returncode, output)
