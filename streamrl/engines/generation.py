"""Rollouts from vLLM: token ids in, sampled tokens with their logprobs and versions out.

One engine lives in the calling process, stepped by a thread of its own (`vllm_thread`); this is its
asyncio front. New weights are applied between two steps while rollouts run on: what was sampled
keeps its version, and what comes next is computed by the new weights from the prompt's first token
on.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import torch

from streamrl.engines.forward import local_device
from streamrl.engines.generator_config import GeneratorConfig, generation_env
from streamrl.engines.pending import PendingCalls, PendingGroup
from streamrl.engines.vllm_engine import EngineSpec, SampleRequest
from streamrl.engines.vllm_thread import EngineThread
from streamrl.errors import ConfigError, DeadlineError, GenerationError, WeightsError
from streamrl.messages import Array, Rollout
from streamrl.weights import full_weights

__all__ = ["GenerationEngine", "GeneratorConfig", "generation_env"]

#: An idle engine shuts down in a second; a step may be under way.
CLOSE_TIMEOUT_S = 60.0
#: Larger seeds do not fit where vLLM keeps them, and -1 would mean none.
MAX_SEED = 2**63 - 1


class GenerationEngine:
    """One replica of the policy that samples; belongs to the event loop it was started on.

    It serves nothing before the first `load_weights`. Many calls may run at once. When the engine
    dies, every pending and every later call raises GenerationError.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._calls = PendingCalls(spec.model_path)
        self._thread = EngineThread(spec, self._calls)
        self._outbox: list[SampleRequest] = []
        self._num_requests = 0
        self._newest = -1

    @classmethod
    async def start(
        cls, model_path: str, config: GeneratorConfig, *, seed: int, max_length: int
    ) -> "GenerationEngine":
        """Build the engine of a model directory in this process, which needs `generation_env`.

        `max_length` bounds prompt and completion together, in tokens; `seed` is the engine's own
        (each rollout has one besides). Takes seconds. Raises ConfigError if vLLM refuses the
        settings, DeadlineError after `start_timeout_s`, GenerationError if the engine dies.
        """
        engine = cls(EngineSpec(model_path, config, seed, max_length))
        engine._thread.start()
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await engine._calls.started
        except TimeoutError as error:
            raise DeadlineError(
                f"vLLM did not start {model_path} within {config.start_timeout_s:g} s"
            ) from error
        finally:
            if engine._calls.started.cancelled():  # nobody waits for it any more
                engine._thread.stop()
        return engine

    @property
    def version(self) -> int:
        """The version of the weights that samples now; -1 before the first."""
        return self._calls.version

    @property
    def num_running(self) -> int:
        """Rollouts asked for and not delivered yet."""
        return sum(len(group.missing) for group in self._calls.groups.values())

    async def generate(
        self,
        prompt_ids: Array,
        *,
        seeds: Sequence[int],
        temperature: float | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Rollout]:
        """One rollout of a prompt, int32 [P], for each seed, in the seeds' order.

        A seed gives the same tokens whatever else the engine does, while the version stays the
        same (up to rounding: the order of sums depends on the batch). Logprobs are those of the
        sampling distribution, at `temperature`; at 0 the likeliest token is taken and logprobs are
        those of temperature 1. A rollout ends with the model's end-of-sequence token, which is part
        of it, or for length.

        Raises ConfigError for a prompt or setting the model cannot take, WeightsError before the
        first version, DeadlineError after `request_timeout_s` and GenerationError if the engine
        dies.
        """
        self._check_request(prompt_ids, seeds)
        config = self._spec.config
        request = SampleRequest(
            number=self._num_requests,
            prompt_ids=prompt_ids.tolist(),
            seeds=tuple(int(seed) for seed in seeds),
            temperature=config.temperature if temperature is None else temperature,
            max_new_tokens=config.max_new_tokens if max_new_tokens is None else max_new_tokens,
        )
        self._num_requests += 1
        group = self._calls.groups[request.number] = PendingGroup(len(seeds))
        self._send(request)
        try:
            async with asyncio.timeout(config.request_timeout_s):
                return await group.done
        except TimeoutError as error:
            raise DeadlineError(
                f"generate: {len(group.missing)} of {len(seeds)} rollouts of a prompt of "
                f"{len(prompt_ids)} tokens were not finished within {config.request_timeout_s:g} s;"
                f" the engine holds version {self.version} and has {self.num_running} to do"
            ) from error
        finally:
            self._forget(request.number)

    async def load_weights(self, tensors: Mapping[str, torch.Tensor | Array], version: int) -> None:
        """Sample with these parameters from the next token on, and call them `version`.

        `tensors` are all parameters by their names in transformers (of tied ones, one is enough),
        or what a trainer of adapters publishes, to be merged into the model directory's weights;
        they must stay as they are until this returns. Rollouts run on, and their keys and values
        are computed anew.

        Raises WeightsError, the engine unharmed, if the version is not newer than the last one or
        a parameter is missing, unknown or of another shape; WeightsError, the engine dead, if vLLM
        fails half-way; DeadlineError, the engine dead, after `request_timeout_s`.
        """
        self._calls.check_alive()
        full = full_weights(
            tensors,
            self._calls.checkpoint.parameters,
            model_path=self._spec.model_path,
            device=local_device(),
        )
        await self._apply(version, lambda: self._thread.load(full, version))

    async def use_checkpoint(self, version: int) -> None:
        """Sample with the weights of the model directory, and call them `version`.

        For those who follow no trainer. Raises as `load_weights` does.
        """
        self._calls.check_alive()
        await self._apply(version, lambda: self._thread.use_checkpoint(version))

    async def _apply(self, version: int, send: Callable[[], None]) -> None:
        """Send the thread what makes it serve `version`, and wait until it does."""
        if version <= self._newest:
            raise WeightsError(f"version {version} came after version {self._newest}")
        self._newest = version
        loaded = self._calls.loads[version] = asyncio.get_running_loop().create_future()
        self._flush()
        send()
        timeout_s = self._spec.config.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await loaded
        except GenerationError as error:
            raise WeightsError(f"version {version} was not loaded: {error}") from error
        except TimeoutError as error:
            self._thread.stop()
            reason = f"version {version} was not loaded within {timeout_s:g} s"
            self._calls.fail(reason)
            raise DeadlineError(reason) from error
        finally:
            self._calls.loads.pop(version, None)

    async def close(self) -> None:
        """End the engine and free its memory; pending calls raise GenerationError."""
        self._calls.fail("the engine was closed")
        self._thread.stop()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._calls.ended.wait()
        except TimeoutError as error:
            raise DeadlineError(f"vLLM's thread did not end in {CLOSE_TIMEOUT_S:g} s") from error

    def _check_request(self, prompt_ids: Array, seeds: Sequence[int]) -> None:
        self._calls.check_alive()
        if self._newest < 0:
            raise WeightsError("the engine holds no version of the weights yet")
        if not 0 < len(prompt_ids) < self._spec.max_length:
            raise ConfigError(
                f"a prompt of {len(prompt_ids)} tokens: must have at least one and leave room for "
                f"another below the maximum length {self._spec.max_length}"
            )
        vocab_size = self._calls.checkpoint.vocab_size
        if not 0 <= prompt_ids.min() <= prompt_ids.max() < vocab_size:
            raise ConfigError(
                f"a prompt with token ids {prompt_ids.min()} to {prompt_ids.max()}: the model has "
                f"{vocab_size} tokens"
            )
        if not seeds or not 0 <= min(seeds) <= max(seeds) <= MAX_SEED:
            raise ValueError(f"seeds={list(seeds)}: needs at least one, all from 0 to {MAX_SEED}")

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
