"""TCP store for torch.distributed rendezvous, bound to a single address.

torch's own server listens on every interface and torch.distributed has no authentication, so
binding to one address keeps hosts outside the job's network away from the ranks.
"""

import socket
from datetime import timedelta

import torch.distributed as dist


def serve_tcp_store(
    host: str, port: int, timeout_s: float, *, world_size: int | None = None
) -> dist.TCPStore:
    """Serve a TCP store for the rendezvous at `host`:`port`; port 0 takes any free port.

    With a `world_size`, wait until that many processes have connected, this process included.
    Raises OSError if the address cannot be bound, RuntimeError if processes are missing after
    `timeout_s` seconds.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address[:2], family=family) as server_socket:
        port = server_socket.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            world_size,
            True,
            timedelta(seconds=timeout_s),
            wait_for_workers=world_size is not None,
            master_listen_fd=server_socket.detach(),
        )
