"""Asking the engine's thread: requests, versions and standstills, each with its deadline."""

import asyncio
from collections.abc import Callable
from typing import Any

from streamrl.engines.generation.pause import PauseState
from streamrl.engines.generation.pending_requests import PendingGroup, PendingRequests
from streamrl.engines.vllm.engine import EngineSpec, SamplingRequest
from streamrl.engines.vllm.engine_thread import EngineThread
from streamrl.errors import DeadlineError, GenerationError, WeightsError
from streamrl.weights import WeightLoadStats

#: An idle engine shuts down in a second; a step may be under way.
CLOSE_TIMEOUT_S = 60.0


class EngineClient:
    """What is asked of one engine, from the event loop it was started on.

    What is not done in time has a DeadlineError, or is the end of an engine that cannot be trusted
    any more.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._pending = PendingRequests(spec.model_path)
        self._thread = EngineThread(spec, self._pending)
        self._pause_state = PauseState()
        self._unsent_requests: list[SamplingRequest] = []
        self._last_request_id = 0
        self._newest_version = -1

    @property
    def version(self) -> int:
        """The version of the weights that samples now; -1 before the first."""
        return self._pending.version

    @property
    def num_running(self) -> int:
        """Rollouts asked for and not delivered yet."""
        return sum(len(group.missing_indices) for group in self._pending.pending_groups.values())

    async def pause(self, reason: str) -> None:
        """Sample nothing from now on, until every reason to has been taken back by `resume`.

        Returns once the step under way has ended. Rollouts under way stay as they are and their
        deadlines stand still; new weights can be loaded. Raises GenerationError, the engine dead,
        if the step does not end within `request_timeout_s`.
        """
        self._pending.check_alive()
        self._pause_state.add_reason(reason)
        await self._call_thread(self._thread.pause, reason)

    async def resume(self, reason: str) -> None:
        """Take back a reason to stand still."""
        if self._pause_state.remove_reason(reason):
            self._thread.resume()

    async def sleep(self) -> None:
        """Free the memory of keys and values; the next step has it again.

        Rollouts under way are prefilled anew then, so that nothing of them is lost. To be called
        while it stands still, or has nothing to do. Raises as `suspend` does.
        """
        self._pending.check_alive()
        await self._call_thread(self._thread.sleep, "release_kv")

    async def close(self) -> None:
        """End the engine and free its memory; pending calls raise GenerationError."""
        self._pending.fail_all("the engine was closed")
        self._thread.stop()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._pending.thread_exit.wait()
        except TimeoutError as error:
            raise DeadlineError(f"vLLM's thread did not end in {CLOSE_TIMEOUT_S:g} s") from error

    async def _apply_version(self, version: int, send: Callable[[], None]) -> WeightLoadStats:
        """Send the thread what makes it serve `version`, and wait until it does."""
        if version <= self._newest_version:
            raise WeightsError(f"version {version} came after version {self._newest_version}")
        self._newest_version = version
        loaded = self._pending.pending_loads[version] = asyncio.get_running_loop().create_future()
        self._flush_requests()
        send()
        timeout_s = self._spec.config.request_timeout_s
        if self._spec.should_drain:
            timeout_s *= 2  # what runs has its own deadline, and is given up when that is over
        try:
            async with asyncio.timeout(timeout_s):
                return await loaded
        except GenerationError as error:
            raise WeightsError(f"version {version} was not loaded: {error}") from error
        except TimeoutError as error:
            raise self._fail_engine(
                f"version {version} was not loaded within {timeout_s:g} s"
            ) from error
        finally:
            self._pending.pending_loads.pop(version, None)

    async def _run_request(self, request: SamplingRequest, group: PendingGroup) -> None:
        """Have the engine sample a request until the group is done."""
        self._pending.pending_groups[request.request_id] = group
        self._queue_request(request)
        timeout_s = self._spec.config.request_timeout_s
        try:
            async with self._pause_state.pausable_timeout(timeout_s):
                await group.done
        except TimeoutError as error:
            raise DeadlineError(
                f"generate: {len(group.missing_indices)} of {len(request.sequences)}"
                f" rollouts of a prompt of "
                f"{len(request.sequences[0].token_ids)} tokens were not finished within"
                f" {timeout_s:g} "
                f"s; the engine holds version {self.version} and has {self.num_running} to do"
            ) from error
        finally:
            self._drop_request(request.request_id)

    async def _call_thread(self, ask: Callable[[int], None], what: str) -> Any:
        """What the thread says between two steps of what it is asked under a new number."""
        call = self._next_request_id()
        answer = self._pending.pending_replies[call] = asyncio.get_running_loop().create_future()
        ask(call)
        try:
            async with asyncio.timeout(self._spec.config.request_timeout_s):
                return await answer
        except TimeoutError as error:
            raise self._fail_engine(f"{what}: the engine did not end a step in time") from error
        finally:
            del self._pending.pending_replies[call]

    def _fail_engine(self, reason: str) -> GenerationError:
        """End an engine that does not do in time what has to be done before it may serve."""
        self._thread.stop()
        self._pending.fail_all(reason)
        return GenerationError(reason)

    def _next_request_id(self) -> int:
        self._last_request_id += 1
        return self._last_request_id

    def _queue_request(self, request: SamplingRequest) -> None:
        """Hand over all requests of one turn of the event loop together: they start in one step."""
        if not self._unsent_requests:
            asyncio.get_running_loop().call_soon(self._flush_requests)
        self._unsent_requests.append(request)

    def _flush_requests(self) -> None:
        if self._unsent_requests:
            self._thread.add_requests(self._unsent_requests)
            self._unsent_requests = []

    def _drop_request(self, number: int) -> None:
        """The caller has all it wants of a request; what still runs of it is given up."""
        missing = self._pending.pending_groups.pop(number).missing_indices
        if missing:
            self._flush_requests()
            self._thread.abort_sequences(number, sorted(missing))
