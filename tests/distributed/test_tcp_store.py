"""TCP store for rendezvous: the address it listens at, and errors of missing ranks."""

import socket

import psutil
import pytest
import torch.distributed as dist

from streamrl.distributed.process_group import join_process_group, serve_tcp_store
from streamrl.errors import ActorError, DeadlineError, WeightsError
from streamrl.weights.transports.collective import serve_readers

HOST = "127.0.0.1"


def list_listening_addresses(port: int) -> list[str]:
    connections = psutil.Process().net_connections(kind="tcp")
    return [
        line.laddr.ip
        for line in connections
        if line.status == psutil.CONN_LISTEN and line.laddr.port == port
    ]


@pytest.mark.parametrize("host", [HOST, "localhost", "127.0.0.2"])
def test_a_store_listens_only_at_its_address(host: str):
    store = serve_tcp_store(host, 0, 10.0)
    assert list_listening_addresses(store.port) == [socket.gethostbyname(host)]
    client = dist.TCPStore(host, store.port, None, False, wait_for_workers=False)
    client.set("a", "b")
    assert store.get("a") == b"b"


def test_missing_ranks_raise_a_deadline_error(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(DeadlineError, match="rank 0 waited 1 s for all 2 ranks to join"):
        join_process_group(rank=0, world_size=2, timeout_s=1.0)


def test_an_address_that_cannot_be_bound_is_named(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server((HOST, 0)) as bound_socket:
        port = bound_socket.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", HOST)
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ActorError, match=f"rank 0 cannot listen at {HOST}:{port}: Address"):
            join_process_group(rank=0, world_size=2, timeout_s=1.0)
    with pytest.raises(WeightsError, match=r"cannot serve readers at 192\.0\.2\.77"):
        serve_readers("192.0.2.77", 1.0)
