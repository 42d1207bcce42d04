"""vLLM computing in several processes that were there before it: those of a team.

The leader has the engine. Each call that goes to all of vLLM's workers it sends to the others, and
then makes it of its own worker; they make it of theirs. What the workers tell each other while they
compute goes through torch.distributed, as they are ranks of one process group already.

Imported by who has vLLM; see `vllm_engine`.
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
"""How much later the end of a process may be seen here than where it was computed with, s."""


class LeaderExecutor(UniProcExecutor):
    """Has every call made by the workers of a team, its own among them."""

    rank_group: RankGroup

    def _init_executor(self) -> None:
        self.driver_worker = build_worker(self.vllm_config, self.rank_group)
        self._connections = _accept_followers(self.rank_group)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """See Executor.collective_rpc. Of what is computed with a `single_value` the leader has it.

        Raises GenerationError naming a process of the team that has died.
        """
        try:
            for connection in self._connections.values():
                connection.send((method, args, kwargs or {}, not single_value))
            own = super().collective_rpc(method, timeout, args, kwargs, single_value=True)
            answers = [own]
            if not single_value:
                answers += [connection.recv() for connection in self._connections.values()]
        except (OSError, EOFError, RuntimeError) as error:
            lost = self.lost_rank
            if lost is None:
                raise
            raise GenerationError(f"rank {lost} of the split generator has died") from error
        answer = own if single_value else answers
        return _make_done_future(answer) if non_block else answer

    @property
    def lost_rank(self) -> int | None:
        """The rank of a follower that has ended, if one has."""
        wait(list(self._connections.values()), DISCONNECT_GRACE_S)
        return next((rank for rank, own in self._connections.items() if _is_closed(own)), None)

    def shutdown(self) -> None:
        """Let the followers end, too."""
        for connection in self._connections.values():
            connection.close()
        super().shutdown()


def _make_done_future(answer: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


def make_rank_group_args(team: RankGroup, timeout_s: float) -> dict[str, Any]:
    """What of vLLM's EngineArgs is that of a team; its ranks wait no longer for each other.

    vLLM makes the executor from its own settings alone, so the class knows the team.
    """
    return {
        "tensor_parallel_size": team.size,
        "distributed_executor_backend": type("Leading", (LeaderExecutor,), {"rank_group": team}),
        "disable_custom_all_reduce": True,
        "distributed_timeout_seconds": math.ceil(timeout_s),
        "cpu_distributed_timeout_seconds": math.ceil(timeout_s),
    }


class FollowerWorker:
    """A worker that makes the calls its leader sends."""

    def __init__(self, config: VllmConfig, team: RankGroup) -> None:
        self.wrapper = build_worker(config, team)
        self._leader_rank = team.leader_rank
        self._connection = _connect_leader(team)
        #: Held by who has the worker do something.
        self.lock = threading.Lock()

    def serve(self) -> None:
        """Until the leader ends the connection.

        Raises GenerationError if the leader dies over a call, and what a call raises.
        """
        try:
            while True:
                method, args, kwargs, is_answered = self._connection.recv()
                with self.lock:
                    answer = run_method(self.wrapper, method, args, kwargs)
                if is_answered:
                    self._connection.send(answer)
        except (OSError, EOFError, RuntimeError) as error:
            if not _is_closed(self._connection, DISCONNECT_GRACE_S):
                raise
            raise GenerationError(
                f"rank {self._leader_rank} of the split generator, which leads it, has ended"
            ) from error
        finally:
            # Nobody is to wait for a worker that has failed.
            self._connection.close()


def build_worker(config: VllmConfig, team: RankGroup) -> WorkerWrapperBase:
    """A worker with its part of the model. Collective over all teams."""
    wrapper = WorkerWrapperBase(rpc_rank=0, global_rank=team.group_rank)
    wrapper.init_worker(
        [
            {
                "vllm_config": config,
                "local_rank": 0,
                "rank": team.group_rank,
                "distributed_init_method": "env://",
                "is_driver_worker": team.is_leader,
                "shared_worker_lock": threading.Lock(),
            }
        ]
    )
    with set_current_vllm_config(config):
        _init_process_groups(config, team)
    wrapper.init_device()
    wrapper.load_model()
    current_platform.update_block_size_for_backend(config)
    return wrapper


def _init_process_groups(config: VllmConfig, team: RankGroup) -> None:
    """vLLM's groups of ranks, which it would make of consecutive ones. Collective."""
    backend, local_rank = dist.get_backend(), 0
    # On a CPU vLLM's ranks would spin in shared memory, for ever if one of them dies.
    os.environ["VLLM_DIST_IDENT"] = f"rank-{team.rank}"
    parallel_state.set_custom_all_reduce(False)
    parallel_state.init_distributed_environment(
        config.parallel_config.world_size, team.group_rank, "env://", local_rank, backend
    )
    alone = [[rank] for rank in range(dist.get_world_size())]
    teams = [list(ranks) for ranks in team.groups]

    def make(ranks: list[list[int]], name: str) -> parallel_state.GroupCoordinator:
        return parallel_state.init_model_parallel_group(ranks, local_rank, backend, group_name=name)

    parallel_state._TP = parallel_state._ETP = make(teams, "tp")
    for name in ("dcp", "pcp", "pp", "dp"):
        setattr(parallel_state, f"_{name.upper()}", make(alone, name))
    if config.model_config.is_moe:
        parallel_state._EP = make(teams, "ep")


def _accept_followers(team: RankGroup) -> dict[int, Connection]:
    """The leader's connections, by rank."""
    key, found = secrets.token_bytes(16), {}
    with Listener((_find_local_address(), 0), backlog=team.size, authkey=key) as listener:
        _broadcast_from_leader(team, [(listener.address, key)])
        for _ in team.ranks[1:]:
            connection = _disable_nagle(listener.accept())
            found[connection.recv()] = connection
    return {rank: found[rank] for rank in team.ranks[1:]}


def _connect_leader(team: RankGroup) -> Connection:
    """A follower's connection."""
    address, key = _broadcast_from_leader(team, [None])
    connection = _disable_nagle(Client(address, authkey=key))
    connection.send(team.rank)
    return connection


def _broadcast_from_leader(team: RankGroup, said: list[Any]) -> Any:
    """What the leader says to its team. Collective."""
    group = parallel_state.get_tp_group().cpu_group
    dist.broadcast_object_list(said, src=team.leader_rank, group=group)
    return said[0]


def _is_closed(connection: Connection, within_s: float = 0.0) -> bool:
    """Whether nobody is at the other end any more; what was said before is lost."""
    try:
        while connection.poll(within_s):
            connection.recv()
    except (OSError, EOFError):
        return True
    return False


def _find_local_address() -> str:
    """Where the other ranks reach this process: as it would reach rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))
        return str(probe.getsockname()[0])


def _disable_nagle(connection: Connection) -> Connection:
    """Sends small messages at once: a call may follow another that nobody answers."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
