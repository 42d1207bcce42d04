"""Asyncio front end of a vLLM engine: prompts in, rollouts with logprobs and versions out.

    event loop:  GenerationEngine --commands--> EngineThread (vllm/engine.py)
                 RequestInFlight  <--results--  steps vLLM's LLMEngine

The engine runs in the calling process on a thread of its own. New weights are loaded between two
decode steps, and running rollouts go on: sampled tokens keep their version, later tokens come from
the new weights. The KV cache of running rollouts is recomputed with the new weights unless
`should_keep_kv`.

A rollout may be sampled piecewise, by several versions and in several engines (arXiv 2501.12599).
Existing tokens keep their logprobs and versions; new tokens are appended. An unfinished rollout has
FinishReason.ABORT; a rollout without sampled tokens consists of the prompt.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from streamrl.dataflow import GENERATE_CALL, GREEDY_CALL
from streamrl.distributed.devices import get_local_device
from streamrl.engines.generator_config import SamplingSettings
from streamrl.engines.models.forward import VALUE_HEADS
from streamrl.engines.vllm.requests import (
    EngineSpec,
    ModelInfo,
    SampledSequence,
    SamplingRequest,
    SequenceRequest,
    TokenCount,
    import_vllm,
    raise_after,
)
from streamrl.errors import ConfigError, GenerationError, WeightsError
from streamrl.messages import (
    Array,
    Columns,
    FinishReason,
    Prompt,
    Rollout,
    columns_to_rollouts,
    derive_continuation_seed,
    extend_wide,
    make_empty_rollout,
    make_rollout_seeds,
    rollouts_to_columns,
)
from streamrl.resharding.storage import ShardStorage
from streamrl.weights import WeightLoadStats
from streamrl.weights.parameters import LORA_SCALE, ParameterSet, build_full_weights
from streamrl.weights.rank_slices import RankSlices
from streamrl.weights.transport import estimate_send_s


def extend_rollout(rollout: Rollout, sampled: SampledSequence) -> Rollout:
    """Return the rollout with the newly sampled tokens of its sequence appended."""
    return Rollout(
        token_ids=_append_values(rollout.token_ids, sampled.token_ids),
        loss_mask=_append_values(rollout.loss_mask, np.ones(len(sampled.token_ids), np.bool_)),
        generator_logprobs=_append_values(rollout.generator_logprobs, sampled.logprobs),
        policy_version=_append_values(rollout.policy_version, sampled.versions),
        finish_reason=sampled.finish_reason,
        wide=extend_wide(
            rollout.wide, sampled.wide, len(rollout.token_ids) + len(sampled.token_ids)
        ),
    )


def _append_values(array: Array, values: Sequence[float] | Array) -> Array:
    return np.concatenate([array, np.asarray(values, array.dtype)])


@dataclass(frozen=True)
class ProgressWatch:
    """Lets `collect_partial_rollouts` return the rollouts of a request while they are sampled.

    `uid` is the key of the request there. `on_finished` is called for each finished rollout, in any
    order.
    """

    uid: str
    on_finished: Callable[[], None] = lambda: None


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


def select_progress(counts: Mapping[str, TokenCount], request_id: int) -> dict[str, int]:
    """Return the tokens so far of the sequences whose progress a request waits for, by vLLM id.

    These are its own sequences or, while they wait in vLLM's queue for others, all of the engine's.
    """
    own = {name: c for name, c in counts.items() if name.startswith(f"{request_id}:")}
    is_queued = own and not any(count.is_running for count in own.values())
    awaited = counts if is_queued else own
    return {name: count.num_tokens for name, count in awaited.items()}


MIN_WAIT_S = 1.0
"""Shortest wait of `PauseState.wait`: a paused engine is looked at no more often."""


class PauseState:
    """Reasons for which an engine is paused, and waits that do not count paused time.

    The engine resumes once the last reason is removed. An instance belongs to one event loop.
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._ended_pauses_s = self._paused_since = 0.0

    @property
    def paused_s(self) -> float:
        """Time with a reason to pause, that of the current pause included, s."""
        if not self._reasons:
            return self._ended_pauses_s
        return self._ended_pauses_s + asyncio.get_running_loop().time() - self._paused_since

    def add_reason(self, reason: str) -> None:
        if not self._reasons:
            self._paused_since = asyncio.get_running_loop().time()
        self._reasons.add(reason)

    def remove_reason(self, reason: str) -> bool:
        """Remove a reason to pause the engine; return whether it was the last."""
        was_last = self._reasons == {reason}
        if was_last:
            self._ended_pauses_s = self.paused_s
        self._reasons.discard(reason)
        return was_last

    async def wait(self, future: asyncio.Future[Any], timeout_s: float) -> bool:
        """Wait for a future, for `timeout_s` without the pauses; return whether it is done."""

        def get_running_time() -> float:
            return asyncio.get_running_loop().time() - self.paused_s

        deadline = get_running_time() + timeout_s
        while not future.done() and (left_s := deadline - get_running_time()) > 0:
            await asyncio.wait([future], timeout=max(left_s, MIN_WAIT_S))
        return future.done()


#: Greedy decoding ignores the seed.
GREEDY_SEED = 0
#: An idle engine shuts down in a second, but a step may be running.
CLOSE_TIMEOUT_S = 60.0
Reply = TypeVar("Reply")


class GenerationEngine:
    """A generating replica of the policy; use it only on the event loop that started it.

    Calls may run concurrently. The engine serves requests after the first `load_weights`. Sampling
    may take any time as long as it makes progress (`_run_request`); every other call has a
    deadline. After a missed one the engine's state is unknown, so the engine ends. Once the engine
    has died, every pending and later call raises GenerationError.
    """

    _model_info: ModelInfo

    def __init__(self, spec: EngineSpec) -> None:
        # `start` has imported the module: it loads vLLM, which reads the environment.
        from streamrl.engines.vllm.engine import EngineThread

        self._spec = spec
        self._thread = EngineThread(spec, self._add_sampled, self._reject_request)
        self._requests: dict[int, RequestInFlight] = {}
        self._unsent_requests: list[SamplingRequest] = []
        self._pause_state = PauseState()
        self._request_ids = itertools.count(1)
        self._newest_version = -1
        self._load_begun = asyncio.Event()

    @classmethod
    async def start(cls, spec: EngineSpec) -> "GenerationEngine":
        """Build the engine of a model directory in this process; takes seconds.

        The process's environment must contain the variables of `make_vllm_env`. With
        `spec.rank_group`, this process must be the leader rank of its tensor-parallel group. The
        other ranks of the group start a `PeerRank` each; all ranks of all groups start
        together.

        Raises ConfigError if vLLM cannot be imported or rejects the settings, DeadlineError if its
        import or the start takes over `start_timeout_s`, and GenerationError if the engine dies.
        """
        await import_vllm("engine", spec)
        engine, late = cls(spec), f"vLLM did not start {spec.model_path}"
        started = engine._thread.start()
        try:
            async with raise_after(spec.config.start_timeout_s, late):
                engine._model_info = await started
        finally:
            if started.cancelled():  # by the timeout or by the caller
                engine._thread.stop()
        return engine

    @property
    def version(self) -> int:
        return self._thread.version

    @property
    def paused_s(self) -> float:
        """Time for which the engine has been paused since its start, s."""
        return self._pause_state.paused_s

    @property
    def num_running(self) -> int:
        """Number of unfinished rollouts that callers of `generate` wait for."""
        return sum(len(request.missing_indices) for request in self._requests.values())

    @property
    def stages(self) -> Mapping[str, Callable[..., Awaitable[Columns]]]:
        """Methods that process the prompts of the two generate stages, by stage name."""
        return {GENERATE_CALL.stage: self.generate_group, GREEDY_CALL.stage: self.generate_greedy}

    async def generate_group(
        self,
        prompt: Prompt,
        partial_rollouts: Columns | None = None,
        on_finished: Callable[[], None] = lambda: None,
    ) -> Columns:
        """Sample `group_size` rollouts of a prompt with the newest weights; return their columns.

        The seeds derive from run seed and uid. `partial_rollouts` are columns from
        `collect_partial_rollouts` of this or another engine, which sampling resumes. `on_finished`
        is called once for each finished rollout.
        """
        rollouts = await self.generate(
            prompt.token_ids,
            seeds=make_rollout_seeds(self._spec.run_seed, prompt.uid, self._spec.group_size),
            partial_rollouts=columns_to_rollouts(partial_rollouts) if partial_rollouts else (),
            watch=ProgressWatch(prompt.uid, on_finished),
        )
        return rollouts_to_columns(rollouts)

    async def generate_greedy(
        self,
        prompt: Prompt,
        partial_rollouts: Columns | None = None,
        on_finished: Callable[[], None] = lambda: None,
    ) -> Columns:
        """Decode one completion of the prompt at temperature 0 with the newest weights.

        Ignores `partial_rollouts` and `on_finished`: a greedy completion is never resumed.
        """
        greedy = SamplingSettings(0.0)
        (rollout,) = await self.generate(prompt.token_ids, seeds=[GREEDY_SEED], sampling=greedy)
        return {"greedy_ids": rollout.completion_ids}

    async def generate(  # noqa: PLR0913
        self,
        prompt_ids: Array,
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings | None = None,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        partial_rollouts: Sequence[Rollout] = (),
        watch: ProgressWatch | None = None,
    ) -> list[Rollout]:
        """Sample a rollout of a prompt, int32 [P], for each seed, in the order of the seeds.

        At a fixed version, a seed yields the same tokens regardless of the engine's other work, up
        to rounding that depends on the batch. Logprobs are those of the sampling distribution
        (`sampling`, by default the generator's temperature); at temperature 0 they are taken at
        temperature 1. A rollout ends at the end-of-sequence token, at a stop token (those of the
        generator and `stop_token_ids`), at the token that completes a stop string (included), or at
        the length limit.

        `partial_rollouts` resumes earlier work: empty, or a rollout per seed. Finished rollouts are
        returned unchanged; unfinished ones keep their tokens and continue under the same length
        limit. The continuation is sampled with `derive_continuation_seed`, so its tokens differ
        from those of an uninterrupted rollout. `watch` makes the call visible to
        `collect_partial_rollouts`.

        Raises ConfigError for a prompt or setting the model does not support, WeightsError before
        the first version, and GenerationError if the engine dies or makes no progress.
        """
        self._check_tokens(prompt_ids)
        config = self._spec.config
        limit = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        rollouts = [*(partial_rollouts or [make_empty_rollout(prompt_ids)] * len(seeds))]
        sequences: list[SequenceRequest] = []
        for index, (rollout, seed) in enumerate(zip(rollouts, seeds, strict=True)):
            if rollout.finish_reason is not FinishReason.ABORT:
                continue
            token_ids = rollout.token_ids.tolist()
            num_sampled = len(token_ids) - len(prompt_ids)
            budget = min(limit - num_sampled, self._spec.max_length - len(token_ids))
            if budget > 0:
                next_seed = derive_continuation_seed(int(seed), num_sampled)
                sequences.append(SequenceRequest(index, token_ids, next_seed, budget, num_sampled))
            else:
                rollouts[index] = replace(rollout, finish_reason=FinishReason.LENGTH)
        missing = [sequence.index for sequence in sequences]
        request = RequestInFlight(rollouts, missing, self._thread.create_future(), watch)
        if sequences:
            settings = sampling or config.sampling
            await self._run_request(
                SamplingRequest(
                    next(self._request_ids),
                    tuple(sequences),
                    settings,
                    stop_token_ids=tuple(stop_token_ids),
                    num_mask_words=0 if sampling else config.num_mask_words,
                ),
                request,
            )
        return request.build_rollouts()

    async def collect_partial_rollouts(self) -> dict[str, Columns]:
        """Return the columns, by uid, of every watched group that has a sampled token.

        Rollouts are in the order of the seeds. Unfinished rollouts have FinishReason.ABORT and may
        consist of the prompt only. All are taken between the same two decode steps. If two calls of
        `generate` share a uid, the later call wins. Raises GenerationError if the engine dies or
        finishes no step within `request_timeout_s`.
        """
        requests = {n: request for n, request in self._requests.items() if request.watch}
        self._flush_requests()
        batch = await self._await_reply(self._thread.list_partials(requests.keys()), "progress")
        running: dict[int, dict[int, SampledSequence]] = {number: {} for number in requests}
        for sampled in batch:
            running[sampled.request_id][sampled.index] = sampled
        progress = {
            r.watch.uid: r.build_rollouts(running[n]) for n, r in requests.items() if r.watch
        }
        return {
            uid: rollouts_to_columns(rollouts)
            for uid, rollouts in progress.items()
            if any(rollout.loss_mask.any() for rollout in rollouts)
        }

    async def wait_until_responsive(self) -> None:
        """Wait for a reply of the engine between two steps, or for a load of weights to run.

        Raises GenerationError if the engine dies or finishes no step within `request_timeout_s`.
        """
        loading = asyncio.create_task(self._load_begun.wait())
        reply = asyncio.create_task(self.collect_partial_rollouts())
        try:
            done, _ = await asyncio.wait({loading, reply}, return_when=asyncio.FIRST_COMPLETED)
            if reply in done:
                await reply
        finally:
            loading.cancel()
            reply.cancel()

    async def compute_logprobs(self, sequences: Sequence[Array]) -> list[Array]:
        """Compute the logprobs of all tokens of sequences, int32 [T] each, with the served weights.

        Returns float32 [T] for each sequence, at temperature 1 and of the same version, with 0 for
        the first token. The prefix cache is not used. A sequence must be shorter than the maximum
        length. Raises as `generate` does.
        """
        for sequence in sequences:
            self._check_tokens(sequence)
        while True:
            version = self.version
            logprobs = [np.zeros(len(sequence), np.float32) for sequence in sequences]
            requests = tuple(
                SequenceRequest(index, sequence.tolist(), 0, max_new_tokens=1)
                for index, sequence in enumerate(sequences)
            )
            if not requests:
                return logprobs
            request = SamplingRequest(
                next(self._request_ids), requests, SamplingSettings(0.0), should_score_prompt=True
            )
            results = RequestInFlight(
                [make_empty_rollout(sequence) for sequence in sequences],
                range(len(requests)),
                self._thread.create_future(),
            )
            await self._run_request(request, results)
            for index, sampled in results.sampled_sequences.items():
                logprobs[index][1:] = sampled.prompt_logprobs
            # If weights were loaded meanwhile, sequences may mix versions: try again.
            if all(sampled.versions == [version] for sampled in results.sampled_sequences.values()):
                return logprobs

    async def load_weights(
        self, tensors: Mapping[str, torch.Tensor | Array], version: int
    ) -> WeightLoadStats:
        """Load parameters as `version` and sample with them from the next token on.

        `tensors` holds either all parameters by their transformers names (a single name of tied
        parameters suffices), or LoRA adapters, which are merged into the model directory's weights.
        The engine aliases the tensors where possible and never writes to them: keep them unchanged
        until a later version is served.

        Running rollouts go on. Their KV cache is recomputed with the new weights, or kept if
        `should_keep_kv`.

        Raises WeightsError and leaves the engine alive if the version is not newer than the last,
        or if a parameter is missing, unknown or of another shape. Ends the engine and raises
        WeightsError if vLLM fails half-way, and GenerationError after `request_timeout_s` and the
        time of the bytes at the slowest supported rate.
        """
        self._thread.check_alive()
        full = await _build_weights(tensors, self._model_info.parameters, self._spec.model_path)
        num_bytes = sum(value.nbytes for value in tensors.values())
        return await self._apply_version(
            version, partial(self._thread.swap_weights, full), estimate_send_s(num_bytes)
        )

    async def get_storage(self) -> ShardStorage | None:
        """Return views of vLLM's parameters, for resharding to write into while paused.

        Call it before the first version; afterwards use `activate_version` instead of
        `load_weights`. Returns None if vLLM's layout differs from the checkpoint's, so that weights
        must go through `load_weights`. Raises GenerationError if the engine dies or finishes no
        step within `request_timeout_s`.
        """
        return await self._await_reply(self._thread.get_storage(), "storage")

    async def activate_version(self, version: int) -> WeightLoadStats:
        """Serve `version`, whose parameters resharding has written into the views of `get_storage`.

        Raises as `load_weights` does.
        """
        return await self._apply_version(version, partial(self._thread.swap_weights, None))

    async def use_model_dir(self, version: int) -> None:
        """Serve the weights of the model directory as `version`, for engines without a trainer.

        Raises as `load_weights` does.
        """
        await self._apply_version(version, self._thread.use_model_dir)

    async def pause(self, reason: str) -> None:
        """Stop decoding until `resume` has removed every reason to pause.

        Returns after the current decode step. Running rollouts are kept and their timeouts
        suspended; weights can be loaded meanwhile. Ends the engine and raises GenerationError if
        the step takes longer than `request_timeout_s`.
        """
        paused = self._thread.pause()
        self._pause_state.add_reason(reason)
        await self._await_reply(paused, reason)

    async def resume(self, reason: str) -> None:
        """Remove a reason to pause the engine; decoding continues once no reason is left."""
        if self._pause_state.remove_reason(reason):
            self._thread.resume()

    async def sleep(self) -> None:
        """Free the KV cache of a paused or idle engine.

        The next decode step allocates the cache again and prefills running rollouts. Raises as
        `pause` does.
        """
        await self._await_reply(self._thread.sleep(), "sleep")

    async def close(self) -> None:
        """Shut the engine down and free its memory; pending calls raise GenerationError."""
        self._thread.fail_pending("the engine was closed")
        self._thread.stop()
        async with raise_after(CLOSE_TIMEOUT_S, "vLLM's thread did not end"):
            await self._thread.exited.wait()

    async def _apply_version(
        self,
        version: int,
        load: Callable[[int], asyncio.Future[WeightLoadStats]],
        transfer_s: float = 0.0,
    ) -> WeightLoadStats:
        """Have the engine's thread load a version, unless it is old; bound the wait.

        transfer_s: time of its bytes, which the wait has besides `request_timeout_s`.
        """
        self._thread.check_alive()
        if version <= self._newest_version:
            raise WeightsError(f"version {version} came after version {self._newest_version}")
        self._newest_version = version
        self._flush_requests()
        loaded, operation = load(version), f"version {version} was not loaded"

        async def wait_until_loaded() -> WeightLoadStats:
            try:
                return await loaded
            except GenerationError as error:
                raise WeightsError(f"{operation}: {error}") from error

        self._load_begun.set()
        try:
            return await self._await_reply(wait_until_loaded(), operation, transfer_s)
        finally:
            self._load_begun.clear()

    async def _run_request(self, request: SamplingRequest, results: RequestInFlight) -> None:
        """Send a request to the engine's thread and wait until all its rollouts are finished.

        They may take any time while the engine samples; else the engine is ended. Looks every
        `request_timeout_s`, paused time excluded, for new tokens of the request since the last
        look, or, while vLLM runs none of its sequences, of any request.
        """

        def describe() -> str:
            return (
                f"generate: {len(results.missing_indices)} of {len(request.sequences)} rollouts"
                f" of a prompt of {len(request.sequences[0].token_ids)} tokens are not finished"
            )

        timeout_s, done = self._spec.config.request_timeout_s, results.done
        last_progress: Mapping[str, int] | None = None
        self._requests[request.request_id] = results
        self._queue_request(request)
        # Retrieve its exception: once the engine is ended here, nothing awaits it.
        done.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while not await self._pause_state.wait(done, timeout_s):
                counts = await self._await_reply(self._thread.count_tokens(), describe())
                progress = select_progress(counts, request.request_id)
                if progress == last_progress and not done.done():
                    raise self._fail_engine(
                        f"{describe()}: no token was sampled for {timeout_s:g} s"
                        f"; the engine serves version {self.version}"
                        f" and runs {self.num_running} rollouts"
                    )
                last_progress = progress
            await done
        finally:
            done.cancel()
            self._drop_request(request.request_id)

    async def _await_reply(
        self, reply: Awaitable[Reply], operation: str, transfer_s: float = 0.0
    ) -> Reply:
        """Await a reply of the engine's thread; end the engine after `request_timeout_s`.

        transfer_s: time that is added for bytes to move.
        """
        timeout_s = self._spec.config.request_timeout_s + transfer_s
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError as error:
            raise self._fail_engine(
                f"{operation}: the engine did not end a step in {timeout_s:g} s"
            ) from error

    def _fail_engine(self, reason: str) -> GenerationError:
        """End the engine, fail all pending calls with `reason` and return the error to raise."""
        self._thread.stop()
        self._thread.fail_pending(reason)
        return GenerationError(reason)

    def _queue_request(self, request: SamplingRequest) -> None:
        """Queue a request to be sent at the end of this event loop iteration.

        All requests of an iteration start in the same decode step.
        """
        if not self._unsent_requests:
            asyncio.get_running_loop().call_soon(self._flush_requests)
        self._unsent_requests.append(request)

    def _flush_requests(self) -> None:
        if self._unsent_requests:
            self._thread.add_requests(self._unsent_requests)
            self._unsent_requests = []

    def _drop_request(self, number: int) -> None:
        missing = self._requests.pop(number).missing_indices
        if missing:
            self._flush_requests()
            self._thread.abort_sequences(number, sorted(missing))

    def _add_sampled(self, batch: Sequence[SampledSequence]) -> None:
        for sampled in batch:
            if sampled.request_id in self._requests:
                self._requests[sampled.request_id].add_sampled(sampled)

    def _reject_request(self, request_id: int, reason: str) -> None:
        request = self._requests.get(request_id)
        if request is not None and not request.done.done():
            request.missing_indices.clear()
            request.done.set_exception(ConfigError(f"vLLM rejected the request: {reason}"))

    def _check_tokens(self, token_ids: Array) -> None:
        self._thread.check_alive()
        if self._newest_version < 0:
            raise WeightsError("the engine has no weights yet: load a version first")
        if not 0 < len(token_ids) < self._spec.max_length:
            raise ConfigError(
                f"a prompt of {len(token_ids)} tokens: must have at least one token and be shorter"
                f" than the maximum length {self._spec.max_length}"
            )
        vocab_size = self._model_info.vocab_size
        if not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
            raise ConfigError(
                f"a prompt with token ids {token_ids.min()} to {token_ids.max()}: the model has "
                f"{vocab_size} tokens"
            )


async def _build_weights(
    tensors: Mapping[str, torch.Tensor | Array], parameters: ParameterSet, model_path: str
) -> Mapping[str, torch.Tensor]:
    """Return all of vLLM's parameters by name, from those that were published; or the slices."""
    if isinstance(tensors, RankSlices):
        return tensors
    # vLLM does not know the value head of a model shared by policy and critic.
    known = {n: value for n, value in tensors.items() if not n.startswith(VALUE_HEADS)}
    device = get_local_device()
    build = partial(build_full_weights, known, parameters, model_path=model_path, device=device)
    # For adapters, transformers may have to load the model directory first.
    return await asyncio.to_thread(build) if LORA_SCALE in known else build()
