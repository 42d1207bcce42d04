"""Base of generator and scorer actors: run the loops of stages, and follow a model's weights.

Replicas join and leave during a run. They hold no state that a restart would lose.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from streamrl.actors.actor_context import ActorContext
from streamrl.actors.liveness import PingableActor
from streamrl.dataflow import ModelCall
from streamrl.pipeline import follow_weights
from streamrl.run_dir.crash_stacks import record_crash_stacks
from streamrl.stream.device_lease import SuspendableWork
from streamrl.stream.protocols import ClosableWeightChannel, FollowerProtocol
from streamrl.weights import ServedVersion


def identity_version(version: int) -> int:
    """Return the policy version unchanged: a follower of the policy must load every version."""
    return version


class ReplicaActor(PingableActor):
    """Base class of actors that serve stages until they leave the run or die."""

    def _join_stream(
        self,
        context: ActorContext,
        calls: Sequence[ModelCall],
        name: str,
        *,
        follows: str | None,
        due: Callable[[int], int] = identity_version,
        suspendable: SuspendableWork | None = None,
    ) -> None:
        """Set up what the actor `name` needs to serve the stages of `calls`.

        follows: role whose weights the actor loads; None for an actor without such a model.
        due: maps a policy version to the version that the followed model must have by then.
        suspendable: work that the actor suspends when another phase needs the shared device pool.
        """
        self._name, self._run_dir = name, context.run_dir
        record_crash_stacks(self._run_dir, name)
        self._stages = context.make_stages(calls, name, suspendable=suspendable)
        self._held_version = ServedVersion(name, resolve_due_version=due) if follows else None
        self._channel: ClosableWeightChannel | None = (
            context.make_channel(name, follows) if follows else None
        )

    async def _run_loops(
        self, loops: Sequence[Coroutine[Any, Any, None]], follower: FollowerProtocol | None
    ) -> None:
        """Run the stage loops until all have ended, and load new weights meanwhile.

        follower: loads the weights; None for an actor without a trained model.
        """
        # Loading an engine replaces the signal handlers (tvm_ffi installs its own).
        record_crash_stacks(self._run_dir, self._name)
        async with asyncio.TaskGroup() as tasks:
            follower_tasks = []
            if (
                follower is not None
                and self._held_version is not None
                and self._channel is not None
            ):
                follow = follow_weights(
                    self._stages[0], follower, self._channel, self._held_version
                )
                follower_tasks.append(tasks.create_task(follow))
            await asyncio.wait([tasks.create_task(loop) for loop in loops])
            for task in follower_tasks:
                task.cancel()
        # Last: releasing ends the leases under which the stages save their partial rollouts.
        await self._stages[0].queue.release_holder(self._name, died=False)
        if self._channel is not None:
            await self._channel.close()

    async def start_drain(self) -> None:
        """Lease no more groups, so that `run` returns once the queue has all groups back."""
        self._stages[0].leave_requested.set()

    async def crash_process(self) -> None:
        """Exit without cleanup, as if killed, because the loaded weights or the engine are bad."""
        os._exit(1)

    async def wait_until_serving(self) -> int:
        """Wait until the first weights are loaded; return their version.

        Returns -1 at once if the actor follows no model.
        """
        return -1 if self._held_version is None else await self._held_version.wait_for_version(0)
