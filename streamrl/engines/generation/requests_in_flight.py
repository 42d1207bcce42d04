"""Requests that an engine runs: their rollouts so far, and timeouts that exclude paused time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from streamrl.engines.generation.partial_rollouts import extend_rollout
from streamrl.engines.vllm.engine import SampledSequence, TokenCount
from streamrl.messages import Rollout


def do_nothing() -> None:
    pass


@dataclass(frozen=True)
class ProgressWatch:
    """Lets `collect_partial_rollouts` return the rollouts of a request while they are sampled.

    `uid` is the key of the request there. `on_finished` is called for each finished rollout, in any
    order.
    """

    uid: str
    on_finished: Callable[[], None] = do_nothing


class RequestInFlight:
    """Collects the sequences that the engine samples for a request.

    partials: all rollouts as they were before the request, finished ones included.
    missing: indices of the unfinished ones.
    done: resolved when none is missing.
    """

    def __init__(
        self,
        partials: Sequence[Rollout],
        missing: Collection[int],
        done: asyncio.Future[None],
        watch: ProgressWatch | None = None,
    ) -> None:
        self.done = done
        self.watch = watch
        self.missing_indices = set(missing)
        self.sampled_sequences: dict[int, SampledSequence] = {}
        self._partials = partials
        self._report_finished(len(partials) - len(self.missing_indices))
        if not self.missing_indices:
            done.set_result(None)

    def add_sampled(self, sampled: SampledSequence) -> None:
        """Store the tokens of a finished sequence; the request's last sequence resolves `done`."""
        self.missing_indices.discard(sampled.index)
        self.sampled_sequences[sampled.index] = sampled
        self._report_finished(1)
        if not self.missing_indices and not self.done.done():
            self.done.set_result(None)

    def _report_finished(self, count: int) -> None:
        if self.watch is not None:
            for _ in range(count):
                self.watch.on_finished()

    def build_rollouts(self, running: Mapping[int, SampledSequence] | None = None) -> list[Rollout]:
        """Return all rollouts of the request, in order, with the tokens sampled so far.

        `running` holds the tokens of unfinished sequences by index; without it, unfinished rollouts
        are as they were at the start.
        """
        sampled = {**(running or {}), **self.sampled_sequences}
        return [
            extend_rollout(rollout, sampled[index]) if index in sampled else rollout
            for index, rollout in enumerate(self._partials)
        ]


def select_progress(
    counts: Mapping[str, TokenCount], request_id: int | None = None
) -> dict[str, int]:
    """Return the tokens so far of the sequences whose progress a request waits for, by vLLM id.

    These are its own sequences. While they wait in vLLM's queue for others, and without a request,
    they are all of the engine's.
    """
    own = {name: c for name, c in counts.items() if name.startswith(f"{request_id}:")}
    is_queued = own and not any(count.is_running for count in own.values())
    awaited = counts if request_id is None or is_queued else own
    return {name: count.num_tokens for name, count in awaited.items()}


class PauseState:
    """Reasons for which an engine is paused, and the request timeouts suspended meanwhile.

    The engine resumes once the last reason is removed. An instance belongs to one event loop.
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._ended_pauses_s = self._paused_since = 0.0
        #: Running timeouts and, while paused, the seconds that remain of each.
        self._remaining_s: dict[asyncio.Timeout, float] = {}

    @property
    def paused_s(self) -> float:
        """Time with a reason to pause, that of the current pause included, s."""
        if not self._reasons:
            return self._ended_pauses_s
        return self._ended_pauses_s + asyncio.get_running_loop().time() - self._paused_since

    def add_reason(self, reason: str) -> None:
        """Add a reason to pause the engine; the first suspends all pausable timeouts."""
        if not self._reasons:
            now = self._paused_since = asyncio.get_running_loop().time()
            for deadline in self._list_running_deadlines():
                self._remaining_s[deadline] = (deadline.when() or now) - now
                deadline.reschedule(None)
        self._reasons.add(reason)

    def remove_reason(self, reason: str) -> bool:
        """Remove a reason to pause the engine; return whether no reason is left.

        Removing the last reason resumes all timeouts of `pausable_timeout`.
        """
        was_last = self._reasons == {reason}
        self._reasons.discard(reason)
        if was_last:
            now = asyncio.get_running_loop().time()
            self._ended_pauses_s += now - self._paused_since
            for deadline in self._list_running_deadlines():
                deadline.reschedule(now + self._remaining_s[deadline])
        return was_last

    def _list_running_deadlines(self) -> list[asyncio.Timeout]:
        """Return the timeouts that have not passed; asyncio cannot reschedule the others."""
        return [deadline for deadline in self._remaining_s if not deadline.expired()]

    @asynccontextmanager
    async def pausable_timeout(self, timeout_s: float) -> AsyncIterator[None]:
        """Raise TimeoutError if the `async with` body takes over `timeout_s` without the pauses."""
        loop = asyncio.get_running_loop()
        deadline = asyncio.timeout_at(None if self._reasons else loop.time() + timeout_s)
        async with deadline:
            self._remaining_s[deadline] = timeout_s
            try:
                yield
            finally:
                del self._remaining_s[deadline]
