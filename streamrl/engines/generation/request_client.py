"""Calls from the event loop to the thread of a vLLM engine, each with a timeout."""

import asyncio
from collections.abc import Callable
from typing import Any

from streamrl.engines.generation.pause import PauseState
from streamrl.engines.generation.pending_requests import PendingGroup, PendingRequests
from streamrl.engines.vllm.engine import EngineSpec, SamplingRequest
from streamrl.engines.vllm.engine_thread import EngineThread
from streamrl.errors import DeadlineError, GenerationError, WeightsError
from streamrl.weights import WeightLoadStats

#: An idle engine shuts down in a second, but a step may be running.
CLOSE_TIMEOUT_S = 60.0


class EngineClient:
    """Base of GenerationEngine: sends calls to the engine's thread and awaits their results.

    A request whose rollouts miss the deadline raises DeadlineError. After a missed deadline of a
    pause or a weight load the engine's state is unknown, so the client ends the engine.
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
        """Version of the weights that the engine samples with; -1 before the first load."""
        return self._pending.version

    @property
    def num_running(self) -> int:
        """Number of unfinished rollouts that callers of `generate` wait for."""
        return sum(len(group.missing_indices) for group in self._pending.pending_groups.values())

    async def pause(self, reason: str) -> None:
        """Stop decoding until `resume` has removed every reason to pause.

        Returns after the current decode step. Running rollouts are kept and their timeouts
        suspended; weights can be loaded meanwhile. Ends the engine and raises GenerationError if
        the step takes longer than `request_timeout_s`.
        """
        self._pending.check_alive()
        self._pause_state.add_reason(reason)
        await self._call_thread(self._thread.pause, reason)

    async def resume(self, reason: str) -> None:
        """Remove a reason to pause; decoding continues once no reason is left."""
        if self._pause_state.remove_reason(reason):
            self._thread.resume()

    async def sleep(self) -> None:
        """Free the KV cache of a paused or idle engine.

        The next decode step allocates the cache again and prefills running rollouts. Raises as
        `pause` does.
        """
        self._pending.check_alive()
        await self._call_thread(self._thread.sleep, "sleep")

    async def close(self) -> None:
        """Shut the engine down and free its memory; pending calls raise GenerationError."""
        self._pending.fail_all("the engine was closed")
        self._thread.stop()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._pending.thread_exit.wait()
        except TimeoutError as error:
            raise DeadlineError(f"vLLM's thread did not end in {CLOSE_TIMEOUT_S:g} s") from error

    async def _apply_version(self, version: int, send: Callable[[], None]) -> WeightLoadStats:
        """Load `version` on the engine's thread and wait until the thread has done so.

        `send` is called to request the load. Returns the statistics of the load. Raises as
        `GenerationEngine.load_weights` does.
        """
        if version <= self._newest_version:
            raise WeightsError(f"version {version} came after version {self._newest_version}")
        self._newest_version = version
        future = self._pending.pending_loads[version] = asyncio.get_running_loop().create_future()
        self._flush_requests()
        send()
        timeout_s = self._spec.config.request_timeout_s
        if self._spec.should_drain:
            timeout_s *= 2  # draining takes up to request_timeout_s, then loading starts
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except GenerationError as error:
            raise WeightsError(f"version {version} was not loaded: {error}") from error
        except TimeoutError as error:
            raise self._fail_engine(
                f"version {version} was not loaded within {timeout_s:g} s"
            ) from error
        finally:
            self._pending.pending_loads.pop(version, None)

    async def _run_request(self, request: SamplingRequest, group: PendingGroup) -> None:
        """Send a request to the engine's thread and wait until all its rollouts are finished.

        Raises DeadlineError after `request_timeout_s`, paused time excluded; the rollouts are then
        aborted.
        """
        self._pending.pending_groups[request.request_id] = group
        self._queue_request(request)
        timeout_s = self._spec.config.request_timeout_s
        try:
            async with self._pause_state.pausable_timeout(timeout_s):
                await group.done
        except TimeoutError as error:
            raise DeadlineError(
                f"generate: {len(group.missing_indices)} of {len(request.sequences)}"
                f" rollouts of a prompt of {len(request.sequences[0].token_ids)} tokens were not"
                f" finished within {timeout_s:g} s; the engine serves version {self.version} and"
                f" runs {self.num_running} rollouts"
            ) from error
        finally:
            self._drop_request(request.request_id)

    async def _call_thread(self, send: Callable[[int], None], operation: str) -> Any:
        """Call `send` with a new call id and return the reply of the engine's thread to that id.

        If no reply arrives within `request_timeout_s`, ends the engine and raises GenerationError.
        """
        call_id = self._next_request_id()
        reply = self._pending.pending_replies[call_id] = asyncio.get_running_loop().create_future()
        send(call_id)
        try:
            async with asyncio.timeout(self._spec.config.request_timeout_s):
                return await reply
        except TimeoutError as error:
            raise self._fail_engine(
                f"{operation}: the engine did not end a step in time"
            ) from error
        finally:
            del self._pending.pending_replies[call_id]

    def _fail_engine(self, reason: str) -> GenerationError:
        """End the engine, fail all pending calls with `reason` and return the error to raise."""
        self._thread.stop()
        self._pending.fail_all(reason)
        return GenerationError(reason)

    def _next_request_id(self) -> int:
        self._last_request_id += 1
        return self._last_request_id

    def _queue_request(self, request: SamplingRequest) -> None:
        """Queue a request to be sent at the end of this event loop iteration.

        All requests of an iteration reach the engine's thread together and start in the same decode
        step.
        """
        if not self._unsent_requests:
            asyncio.get_running_loop().call_soon(self._flush_requests)
        self._unsent_requests.append(request)

    def _flush_requests(self) -> None:
        """Send the queued requests to the engine's thread."""
        if self._unsent_requests:
            self._thread.add_requests(self._unsent_requests)
            self._unsent_requests = []

    def _drop_request(self, number: int) -> None:
        """Forget a request; abort those of its rollouts that are not finished."""
        missing = self._pending.pending_groups.pop(number).missing_indices
        if missing:
            self._flush_requests()
            self._thread.abort_sequences(number, sorted(missing))
