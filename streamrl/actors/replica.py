"""What generators and scorers have in common: loops on the queue, and a model to follow.

There are several of a role, they come and go while the run goes on, and hold nothing that is lost.
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
    """What is due at a version of the policy: that version."""
    return version


class ReplicaActor(PingableActor):
    """The part of an actor that serves stages until it is killed, or is to leave."""

    def _join_stream(
        self,
        wiring: ActorContext,
        calls: Sequence[ModelCall],
        name: str,
        *,
        follows: str | None,
        due: Callable[[int], int] = identity_version,
        suspendable: SuspendableWork | None = None,
    ) -> None:
        """Have places in the stream, and a channel to the model that is followed, if one is."""
        self._name, self._run_dir = name, wiring.run_dir
        record_crash_stacks(self._run_dir, name)
        self._stages = wiring.make_stages(calls, name, suspendable=suspendable)
        self._held_version = ServedVersion(name, resolve_due_version=due) if follows else None
        self._channel: ClosableWeightChannel | None = (
            wiring.make_channel(name, follows) if follows else None
        )

    async def _run_loops(
        self, loops: Sequence[Coroutine[Any, Any, None]], follower: FollowerProtocol | None
    ) -> None:
        """Go through the loops, and follow the weights beside them, until all loops have ended."""
        # An engine's libraries (tvm_ffi) take the signals for themselves as they are loaded.
        record_crash_stacks(self._run_dir, self._name)
        async with asyncio.TaskGroup() as tasks:
            following = []
            if (
                follower is not None
                and self._held_version is not None
                and self._channel is not None
            ):
                follow = follow_weights(
                    self._stages[0], follower, self._channel, self._held_version
                )
                following.append(tasks.create_task(follow))
            await asyncio.wait([tasks.create_task(loop) for loop in loops])
            for task in following:
                task.cancel()
        # Not before all stages have left their notes: they are of the leases that end here.
        await self._stages[0].queue.release_holder(self._name, died=False)
        if self._channel is not None:
            await self._channel.close()

    async def start_drain(self) -> None:
        """Take nothing more; `run` ends once what is held lies with the queue."""
        self._stages[0].leave_requested.set()

    async def crash_process(self) -> None:
        """End this process as a death would: what it serves is not to be trusted any more."""
        os._exit(1)

    async def wait_until_serving(self) -> int:
        """Which version is held, once there is one; -1 if no model is followed."""
        return -1 if self._held_version is None else await self._held_version.wait_for_version(0)
