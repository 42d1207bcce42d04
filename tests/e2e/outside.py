"""Access to a run from other processes of its machine: listening servers, and authentication."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil

from tests.e2e.launched import Launched

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
#: A harmless call for each kind of server of Ray.
CALLS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "NodeManagerService/GetNodeStats",
    "CoreWorkerService/GetCoreWorkerStats",
)
#: A call of the object manager, which has no harmless one: made only without the right token.
OBJECTS = "ObjectManagerService/Push"
AGENT = "get_runtime_envs_info"
ANSWER_S = 5.0
JOIN = """
import sys
import ray

ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
print("answer", ray.get(ray.remote(num_cpus=0)(lambda: 6 * 7).remote(), timeout=60))
"""

Statuses = tuple[str, str, str]
"""Replies to a caller without a token, with a wrong one, and with the run's own."""


@dataclass(frozen=True)
class Outside:
    """A running run, seen from outside.

    commands: command lines of its processes. servers: each address that a process listens at, with
    the process's name. statuses: replies of Ray's servers by call. joined: exit code and output of
    a script without a token, with a wrong one, and with the run's own.
    """

    token: str
    logs: Path
    commands: list[str]
    servers: list[tuple[str, str]]
    statuses: dict[str, list[Statuses]]
    joined: list[tuple[int, str]]


def inspect_run(run: Launched) -> Outside:
    """Inspect a run whose actors have started."""
    options = read_options(run.process.pid)
    token, address = options["RAY_AUTH_TOKEN"], options["--gcs-address"]
    tokens = ("", "0" * len(token), token)
    # Some processes of Ray write their title over their environment, and so over the run's mark.
    children = psutil.Process(run.process.pid).children(recursive=True)
    processes = list({*run.processes(), *children})
    # Now: a fast run may end while the scripts try to join.
    commands = [" ".join(process.cmdline()) for process in processes]
    scripts = [start_script(address, token) for token in tokens]
    servers = [
        (address, " ".join(process.cmdline()[:1]) or process.name())
        for process in processes
        for address in list_addresses(process)
    ]
    statuses: dict[str, list[Statuses]] = {}
    for address, name in servers:
        # Ranks and generators also have ports of torch.distributed, which reply to no call.
        if not re.search("Trainer|Generator|Hybrid", name):
            call, replies = call_server(address, tokens)
            if call:
                statuses.setdefault(call, []).append(replies)
    outputs = [script.communicate(timeout=180)[0] for script in scripts]
    return Outside(
        token=token,
        logs=Path(options["--log_dir"]),
        commands=commands,
        servers=servers,
        statuses=statuses,
        joined=[(s.returncode, output) for s, output in zip(scripts, outputs, strict=True)],
    )


def read_options(pid: int) -> dict[str, str]:
    """Return what the commands of docs/security.md print for a run, and its raylet's options."""
    (block,) = re.findall(r"^```\n(tr .*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    shell = ["bash", "-ec", re.sub(r"\bPID\b", str(pid), block)]
    commands = (shell, ["pgrep", "-a", "-P", str(pid), "raylet"])
    outputs = [subprocess.check_output(command, text=True, timeout=30) for command in commands]
    words = " ".join(outputs).split()
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def list_addresses(process: psutil.Process) -> list[str]:
    """Return each address and port that a process listens at."""
    try:
        connections = process.net_connections(kind="inet")
    except psutil.Error:
        return []
    # gRPC servers write an IPv4 address as an IPv6 one.
    return [
        f"{connection.laddr.ip.removeprefix('::ffff:')}:{connection.laddr.port}"
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]


def call_server(address: str, tokens: Statuses) -> tuple[str, Statuses]:
    """Return the call that a server of Ray knows, "" if none, and its reply to each token."""
    without, wrong, right = tokens
    for call in CALLS:
        grpc_statuses = [call_grpc(address, call, token) for token in tokens]
        if grpc_statuses[-1] == "OK":
            return call, (grpc_statuses[0], grpc_statuses[1], "OK")
        if "UNAVAILABLE" in grpc_statuses:
            break
    else:
        return OBJECTS, (
            call_grpc(address, OBJECTS, without),
            call_grpc(address, OBJECTS, wrong),
            "",
        )
    replies = (post(address, without), post(address, wrong), post(address, right))
    return (AGENT if replies[-1] == "200" else ""), replies


def call_grpc(address: str, call: str, token: str) -> str:
    """Return the status of a call, made without Ray."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address) as channel:
        method = channel.unary_unary(f"/ray.rpc.{call}")
        try:
            method(b"", timeout=ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def post(address: str, token: str) -> str:
    """Return the status of a request to an agent of Ray, which speaks HTTP."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        reply = httpx.post(f"http://{address}/{AGENT}", headers=headers, timeout=ANSWER_S)
    except httpx.HTTPError as error:
        return type(error).__name__
    return str(reply.status_code)


def start_script(address: str, token: str) -> "subprocess.Popen[str]":
    """Start a script that joins the run's Ray cluster with a token."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if token:
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    return subprocess.Popen(
        [sys.executable, "-c", JOIN, address],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        cwd="/",
    )
