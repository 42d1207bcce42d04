"""Asking the engine's thread: requests, versions and standstills, each with its deadline."""

import asyncio
from collections.abc import Callable
from typing import Any

from streamrl.engines.generation.pause import Standstill
from streamrl.engines.generation.pending_requests import PendingCalls, PendingGroup
from streamrl.engines.vllm.engine import EngineSpec, SampleRequest
from streamrl.engines.vllm.engine_thread import EngineThread
from streamrl.errors import DeadlineError, GenerationError, WeightsError
from streamrl.weights import Loaded

#: An idle engine shuts down in a second; a step may be under way.
CLOSE_TIMEOUT_S = 60.0


class EngineCalls:
    """What is asked of one engine, from the event loop it was started on.

    What is not done in time has a DeadlineError, or is the end of an engine that cannot be trusted
    any more.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._calls = PendingCalls(spec.model_path)
        self._thread = EngineThread(spec, self._calls)
        self._standstill = Standstill()
        self._outbox: list[SampleRequest] = []
        self._num_requests = 0
        self._newest = -1

    @property
    def version(self) -> int:
        """The version of the weights that samples now; -1 before the first."""
        return self._calls.version

    @property
    def num_running(self) -> int:
        """Rollouts asked for and not delivered yet."""
        return sum(len(group.missing) for group in self._calls.groups.values())

    async def suspend(self, reason: str) -> None:
        """Sample nothing from now on, until every reason to has been taken back by `resume`.

        Returns once the step under way has ended. Rollouts under way stay as they are and their
        deadlines stand still; new weights can be loaded. Raises GenerationError, the engine dead,
        if the step does not end within `request_timeout_s`.
        """
        self._calls.check_alive()
        self._standstill.begin(reason)
        await self._answer(self._thread.stand_still, reason)

    async def resume(self, reason: str) -> None:
        """Take back a reason to stand still."""
        if self._standstill.end(reason):
            self._thread.move_on()

    async def release_kv(self) -> None:
        """Free the memory of keys and values; the next step has it again.

        Rollouts under way are prefilled anew then, so that nothing of them is lost. To be called
        while it stands still, or has nothing to do. Raises as `suspend` does.
        """
        self._calls.check_alive()
        await self._answer(self._thread.release_kv, "release_kv")

    async def close(self) -> None:
        """End the engine and free its memory; pending calls raise GenerationError."""
        self._calls.fail("the engine was closed")
        self._thread.stop()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._calls.ended.wait()
        except TimeoutError as error:
            raise DeadlineError(f"vLLM's thread did not end in {CLOSE_TIMEOUT_S:g} s") from error

    async def _apply(self, version: int, send: Callable[[], None]) -> Loaded:
        """Send the thread what makes it serve `version`, and wait until it does."""
        if version <= self._newest:
            raise WeightsError(f"version {version} came after version {self._newest}")
        self._newest = version
        loaded = self._calls.loads[version] = asyncio.get_running_loop().create_future()
        self._flush()
        send()
        timeout_s = self._spec.config.request_timeout_s
        if self._spec.drains:
            timeout_s *= 2  # what runs has its own deadline, and is given up when that is over
        try:
            async with asyncio.timeout(timeout_s):
                return await loaded
        except GenerationError as error:
            raise WeightsError(f"version {version} was not loaded: {error}") from error
        except TimeoutError as error:
            raise self._given_up(
                f"version {version} was not loaded within {timeout_s:g} s"
            ) from error
        finally:
            self._calls.loads.pop(version, None)

    async def _sample(self, request: SampleRequest, group: PendingGroup) -> None:
        """Have the engine sample a request until the group is done."""
        self._calls.groups[request.number] = group
        self._send(request)
        timeout_s = self._spec.config.request_timeout_s
        try:
            async with self._standstill.deadline(timeout_s):
                await group.done
        except TimeoutError as error:
            raise DeadlineError(
                f"generate: {len(group.missing)} of {len(request.draws)} rollouts of a prompt of "
                f"{len(request.draws[0].token_ids)} tokens were not finished within {timeout_s:g} "
                f"s; the engine holds version {self.version} and has {self.num_running} to do"
            ) from error
        finally:
            self._forget(request.number)

    async def _answer(self, ask: Callable[[int], None], what: str) -> Any:
        """What the thread says between two steps of what it is asked under a new number."""
        call = self._next_number()
        answer = self._calls.answers[call] = asyncio.get_running_loop().create_future()
        ask(call)
        try:
            async with asyncio.timeout(self._spec.config.request_timeout_s):
                return await answer
        except TimeoutError as error:
            raise self._given_up(f"{what}: the engine did not end a step in time") from error
        finally:
            del self._calls.answers[call]

    def _given_up(self, reason: str) -> GenerationError:
        """End an engine that does not do in time what has to be done before it may serve."""
        self._thread.stop()
        self._calls.fail(reason)
        return GenerationError(reason)

    def _next_number(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def _send(self, request: SampleRequest) -> None:
        """Hand over all requests of one turn of the event loop together: they start in one step."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(request)

    def _flush(self) -> None:
        if self._outbox:
            self._thread.sample(self._outbox)
            self._outbox = []

    def _forget(self, number: int) -> None:
        """The caller has all it wants of a request; what still runs of it is given up."""
        missing = self._calls.groups.pop(number).missing
        if missing:
            self._flush()
            self._thread.abort(number, sorted(missing))
