"""Tensor-parallel vLLM in existing trainer processes: an executor and its peer workers.

    leader rank:    LLMEngine -> LeaderExecutor -> its worker
                                      |  method, args (a TCP connection per peer)
    peer rank:  PeerWorker <--+-> its worker

vLLM's own executors start processes; this one uses the ranks of a RankGroup. `collective_rpc` sends
each call to the peers and then calls the leader's worker. Collectives of the model go through
torch.distributed, whose default process group contains all ranks already.
"""

import math
import os
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import torch.distributed as dist
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from streamrl.engines.vllm.rank_groups import RankGroup
from streamrl.errors import GenerationError

DISCONNECT_GRACE_S = 2.0
"""Time until a peer's death closes its connection, s; its collectives may fail earlier."""


class LeaderExecutor(UniProcExecutor):
    """vLLM executor that runs every call on all workers of a rank group, its own included."""

    rank_group: RankGroup

    def _init_executor(self) -> None:
        self.driver_worker = build_worker(self.vllm_config, self.rank_group)
        self._connections = _accept_peers(self.rank_group)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Call a method of the workers on all ranks; return the results, leader first.

        Parameters are those of vLLM's Executor.collective_rpc; with `single_value`, only the
        leader's result is returned. Raises GenerationError that names the rank of a peer that
        has died.
        """
        try:
            for connection in self._connections.values():
                connection.send((method, args, kwargs or {}, not single_value))
            leader_answer = super().collective_rpc(method, timeout, args, kwargs, single_value=True)
            answers = [leader_answer]
            if not single_value:
                answers += [connection.recv() for connection in self._connections.values()]
        except (OSError, EOFError, RuntimeError) as error:
            lost_rank = self.lost_rank
            if lost_rank is None:
                raise
            raise GenerationError(f"rank {lost_rank} of the split generator has died") from error
        answer = leader_answer if single_value else answers
        return _make_done_future(answer) if non_block else answer

    @property
    def lost_rank(self) -> int | None:
        """Rank of a peer of this engine whose process has ended, or None."""
        wait(list(self._connections.values()), DISCONNECT_GRACE_S)
        return next(
            (rank for rank, connection in self._connections.items() if _is_closed(connection)), None
        )

    def shutdown(self) -> None:
        for connection in self._connections.values():
            connection.close()
        super().shutdown()


def _make_done_future(answer: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


def make_rank_group_args(rank_group: RankGroup, timeout_s: float) -> dict[str, Any]:
    """Return the EngineArgs that run an engine on a rank group; `timeout_s` bounds collectives.

    vLLM constructs the executor from a class and its config only, so a subclass carries the group.
    """
    return {
        "tensor_parallel_size": rank_group.size,
        "distributed_executor_backend": type(
            "Leading", (LeaderExecutor,), {"rank_group": rank_group}
        ),
        "disable_custom_all_reduce": True,
        "distributed_timeout_seconds": math.ceil(timeout_s),
        "cpu_distributed_timeout_seconds": math.ceil(timeout_s),
    }


class PeerWorker:
    """Executes the calls of the leader rank on the vLLM worker of a peer rank."""

    def __init__(self, config: VllmConfig, rank_group: RankGroup) -> None:
        self.wrapper = build_worker(config, rank_group)
        self._leader_rank = rank_group.leader_rank
        self._connection = _connect_leader(rank_group)
        #: Guards the worker: `serve` and weight loads run on different threads.
        self.lock = threading.Lock()

    def serve(self, on_called: Callable[[Any], None]) -> None:
        """Execute the leader's calls until the leader closes the connection.

        on_called: receives the method of each call after it, before its answer is sent.

        Raises GenerationError if the leader's process ends, and any exception of a call.
        """
        try:
            while True:
                method, args, kwargs, is_answered = self._connection.recv()
                with self.lock:
                    answer = run_method(self.wrapper, method, args, kwargs)
                on_called(method)
                if is_answered:
                    self._connection.send(answer)
        except (OSError, EOFError, RuntimeError) as error:
            if not _is_closed(self._connection, DISCONNECT_GRACE_S):
                raise
            raise GenerationError(
                f"rank {self._leader_rank} of the split generator, which leads it, has ended"
            ) from error
        finally:
            # The leader must not wait for a failed worker.
            self._connection.close()


def build_worker(config: VllmConfig, rank_group: RankGroup) -> WorkerWrapperBase:
    """Build the vLLM worker of this rank and load its part of the model.

    Collective: every rank of every tensor-parallel group must call it.
    """
    wrapper = WorkerWrapperBase(rpc_rank=0, global_rank=rank_group.group_rank)
    wrapper.init_worker(
        [
            {
                "vllm_config": config,
                "local_rank": 0,
                "rank": rank_group.group_rank,
                "distributed_init_method": "env://",
                "is_driver_worker": rank_group.is_leader,
                "shared_worker_lock": threading.Lock(),
            }
        ]
    )
    with set_current_vllm_config(config):
        _init_process_groups(config, rank_group)
    wrapper.init_device()
    wrapper.load_model()
    current_platform.update_block_size_for_backend(config)
    return wrapper


def _init_process_groups(config: VllmConfig, rank_group: RankGroup) -> None:
    """Initialize vLLM's process groups. Collective.

    vLLM would form tensor-parallel groups of consecutive ranks; a RankGroup's ranks need not be.
    """
    backend, local_rank = dist.get_backend(), 0
    # vLLM's CPU ranks use shared-memory collectives only if their identifiers agree. Those would
    # spin forever after the death of a rank, so let the identifiers differ: vLLM then uses gloo.
    os.environ["VLLM_DIST_IDENT"] = f"rank-{rank_group.rank}"
    parallel_state.set_custom_all_reduce(False)
    parallel_state.init_distributed_environment(
        config.parallel_config.world_size, rank_group.group_rank, "env://", local_rank, backend
    )
    single_ranks = [[rank] for rank in range(dist.get_world_size())]
    tp_groups = [list(ranks) for ranks in rank_group.groups]

    def make_group(ranks: list[list[int]], name: str) -> parallel_state.GroupCoordinator:
        return parallel_state.init_model_parallel_group(ranks, local_rank, backend, group_name=name)

    parallel_state._TP = parallel_state._ETP = make_group(tp_groups, "tp")
    for name in ("dcp", "pcp", "pp", "dp"):
        setattr(parallel_state, f"_{name.upper()}", make_group(single_ranks, name))
    if config.model_config.is_moe:
        parallel_state._EP = make_group(tp_groups, "ep")


def _accept_peers(rank_group: RankGroup) -> dict[int, Connection]:
    key, connections = secrets.token_bytes(16), {}
    with Listener((_find_local_address(), 0), backlog=rank_group.size, authkey=key) as listener:
        _broadcast_from_leader(rank_group, [(listener.address, key)])
        for _ in rank_group.ranks[1:]:
            connection = _disable_nagle(listener.accept())
            connections[connection.recv()] = connection
    return {rank: connections[rank] for rank in rank_group.ranks[1:]}


def _connect_leader(rank_group: RankGroup) -> Connection:
    address, key = _broadcast_from_leader(rank_group, [None])
    connection = _disable_nagle(Client(address, authkey=key))
    connection.send(rank_group.rank)
    return connection


def _broadcast_from_leader(rank_group: RankGroup, objects: list[Any]) -> Any:
    group = parallel_state.get_tp_group().cpu_group
    dist.broadcast_object_list(objects, src=rank_group.leader_rank, group=group)
    return objects[0]


def _is_closed(connection: Connection, within_s: float = 0.0) -> bool:
    """Return whether the peer closes within `within_s`; discards pending messages."""
    try:
        while connection.poll(within_s):
            connection.recv()
    except (OSError, EOFError):
        return True
    return False


def _find_local_address() -> str:
    """Return this host's address on the interface that reaches rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))
        return str(probe.getsockname()[0])


def _disable_nagle(connection: Connection) -> Connection:
    """Set TCP_NODELAY: consecutive calls without replies would wait for delayed ACKs."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
