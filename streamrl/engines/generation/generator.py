"""Asyncio front end of a vLLM engine: token ids in, tokens with logprobs and versions out.

    event loop:  GenerationEngine --commands--> EngineThread (vllm/engine_thread.py)
                 PendingRequests  <--results--  steps vLLM's LLMEngine

The engine runs in the calling process on a thread of its own. New weights are loaded between two
decode steps, and running rollouts go on: sampled tokens keep their version, later tokens come from
the new weights. The KV cache of running rollouts is recomputed with the new weights unless
`should_keep_kv`. With `should_drain`, rollouts finish before the weights are loaded.
"""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from streamrl.engines.generation.partial_rollouts import (
    count_remaining_tokens,
    derive_continuation_seed,
    finish_by_length,
    make_empty_rollout,
    resolve_partials,
)
from streamrl.engines.generation.pending_requests import PendingGroup, ProgressWatch
from streamrl.engines.generation.request_client import EngineClient
from streamrl.engines.generator_config import GeneratorConfig, SamplingSettings
from streamrl.engines.models.forward import get_local_device
from streamrl.engines.vllm.engine import (
    EngineSpec,
    SampledSequence,
    SamplingRequest,
    SequenceRequest,
)
from streamrl.errors import ConfigError, DeadlineError, WeightsError
from streamrl.messages import Array, Rollout
from streamrl.resharding.storage import ShardStorage
from streamrl.weights import WeightLoadStats
from streamrl.weights.lora_merge import build_full_weights

__all__ = ["GenerationEngine", "GeneratorConfig", "WeightLoadStats"]

#: vLLM keeps seeds as int64; -1 means no seed.
MAX_SEED = 2**63 - 1


class GenerationEngine(EngineClient):
    """A generating replica of the policy; use it only on the event loop that started it.

    Calls may run concurrently. The engine serves requests after the first `load_weights`. Once the
    engine has died, every pending and later call raises GenerationError.
    """

    @classmethod
    async def start(
        cls,
        model_path: str,
        config: GeneratorConfig,
        *,
        seed: int,
        max_length: int,
        should_drain: bool = False,
        should_keep_kv: bool = False,
    ) -> "GenerationEngine":
        """Build the engine of a model directory in this process; takes seconds.

        The process's environment must contain the variables of `make_vllm_env`. `max_length` bounds
        prompt plus completion, in tokens. `seed` seeds vLLM itself; every rollout has its own seed.
        `load_weights` describes `should_drain` and `should_keep_kv`. Raises ConfigError if vLLM
        rejects the settings, DeadlineError after `start_timeout_s` and GenerationError if the
        engine dies.
        """
        return await cls.start_from_spec(
            EngineSpec(model_path, config, seed, max_length, should_drain, should_keep_kv)
        )

    @classmethod
    async def start_from_spec(cls, spec: EngineSpec) -> "GenerationEngine":
        """Build the engine that an EngineSpec describes, as `start` does.

        With `spec.rank_group`, this process must be the leader rank of its tensor-parallel group.
        The other ranks of the group start a `FollowerRank` each; all ranks of all groups start
        together.
        """
        engine, timeout_s = cls(spec), spec.config.start_timeout_s
        engine._thread.start()
        try:
            async with asyncio.timeout(timeout_s):
                await engine._pending.started
        except TimeoutError as error:
            raise DeadlineError(
                f"vLLM did not start {spec.model_path} within {timeout_s:g} s"
            ) from error
        finally:
            if engine._pending.started.cancelled():  # by the timeout or by the caller
                engine._thread.stop()
        return engine

    async def generate(
        self,
        prompt_ids: Array,
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings | None = None,
        max_new_tokens: int | None = None,
        partial_rollouts: Sequence[Rollout] = (),
        watch: ProgressWatch | None = None,
    ) -> list[Rollout]:
        """Sample a rollout of a prompt, int32 [P], for each seed, in the order of the seeds.

        At a fixed version, a seed yields the same tokens regardless of the engine's other work, up
        to rounding that depends on the batch. Logprobs are those of the sampling distribution
        (`sampling`, by default the generator's temperature); at temperature 0 they are taken at
        temperature 1. A rollout ends at the end-of-sequence token, at a stop token, at the token
        that completes a stop string (included), or at the length limit.

        `partial_rollouts` resumes earlier work: empty, or a rollout per seed. Finished rollouts are
        returned unchanged; unfinished ones keep their tokens and continue under the same length
        limit. The continuation is sampled with `derive_continuation_seed`, so its tokens differ
        from those of an uninterrupted rollout. `watch` makes the call visible to
        `collect_partial_rollouts`.

        Raises ConfigError for a prompt or setting the model does not support, WeightsError before
        the first version, DeadlineError after `request_timeout_s` and GenerationError if the engine
        dies.
        """
        self._check_tokens(prompt_ids)
        _validate_seeds(seeds)
        config = self._spec.config
        limit = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        rollouts = resolve_partials(prompt_ids, partial_rollouts, num_rollouts=len(seeds))
        budgets = [
            count_remaining_tokens(
                rollout,
                num_prompt=len(prompt_ids),
                max_new_tokens=limit,
                max_length=self._spec.max_length,
            )
            for rollout in rollouts
        ]
        rollouts = [
            rollout if budget else finish_by_length(rollout)
            for rollout, budget in zip(rollouts, budgets, strict=True)
        ]
        sequences = tuple(
            _make_sequence_request(
                index, rollout, budgets[index], int(seeds[index]), len(prompt_ids)
            )
            for index, rollout in enumerate(rollouts)
            if budgets[index]
        )
        group = PendingGroup(rollouts, [sequence.index for sequence in sequences], watch)
        if sequences:
            settings = sampling or SamplingSettings(config.temperature)
            await self._run_request(
                SamplingRequest(self._next_request_id(), sequences, settings), group
            )
        return group.build_rollouts()

    async def collect_partial_rollouts(self) -> dict[str, list[Rollout]]:
        """Return the rollouts sampled so far by all running `generate` calls with a `watch`.

        Keys are the watches' names; rollouts are in the order of the seeds. Unfinished rollouts
        have FinishReason.ABORT and may consist of the prompt only. All are taken between the same
        two decode steps. If two calls share a name, the later call wins. Raises GenerationError if
        the engine dies or finishes no step within `request_timeout_s`.
        """
        self._pending.check_alive()
        groups = {
            n: group for n, group in self._pending.pending_groups.items() if group.watch is not None
        }
        self._flush_requests()
        batch: Sequence[SampledSequence] = await self._call_thread(
            lambda call: self._thread.request_partials(call, groups.keys()), "progress"
        )
        running: dict[int, dict[int, SampledSequence]] = {number: {} for number in groups}
        for sampled in batch:
            running[sampled.request_id][sampled.index] = sampled
        return {g.watch.name: g.build_rollouts(running[n]) for n, g in groups.items() if g.watch}

    async def compute_logprobs(self, sequences: Sequence[Array]) -> tuple[int, list[Array]]:
        """Compute the logprobs of all tokens of sequences, int32 [T] each, with the served weights.

        Returns the version of the weights and, for each sequence, float32 [T] at temperature 1,
        with 0 for the first token. The prefix cache is not used. A sequence must be shorter than
        the maximum length. Raises as `generate` does, except that a timeout ends the engine and
        raises GenerationError.
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
                return version, logprobs
            request = SamplingRequest(
                self._next_request_id(), requests, SamplingSettings(0.0), should_score_prompt=True
            )
            prompts = [make_empty_rollout(sequence) for sequence in sequences]
            group = PendingGroup(prompts, range(len(requests)))
            try:
                await self._run_request(request, group)
            except DeadlineError as error:
                raise self._fail_engine(f"a logprob check was not answered: {error}") from error
            for index, sampled in group.sampled_sequences.items():
                logprobs[index][1:] = sampled.prompt_logprobs
            # If weights were loaded meanwhile, sequences may mix versions: try again.
            if all(sampled.versions == [version] for sampled in group.sampled_sequences.values()):
                return version, logprobs

    async def load_weights(
        self, tensors: Mapping[str, torch.Tensor | Array], version: int
    ) -> WeightLoadStats:
        """Load parameters as `version` and sample with them from the next token on.

        `tensors` holds either all parameters by their transformers names (a single name of tied
        parameters suffices), or LoRA adapters, which are merged into the model directory's weights.
        The engine aliases the tensors where possible and never writes to them: keep them unchanged
        until a later version is served.

        Running rollouts go on. Their KV cache is recomputed with the new weights, or kept if
        `should_keep_kv`. With `should_drain`, the engine first finishes its earlier requests and
        starts no new ones meanwhile.

        Raises WeightsError and leaves the engine alive if the version is not newer than the last,
        or if a parameter is missing, unknown or of another shape. Ends the engine and raises
        WeightsError if vLLM fails half-way, GenerationError after `request_timeout_s` (twice that
        if draining).
        """
        self._pending.check_alive()
        full = build_full_weights(
            tensors,
            self._pending.model_info.parameters,
            model_path=self._spec.model_path,
            device=get_local_device(),
        )
        return await self._apply_version(version, lambda: self._thread.load_weights(full, version))

    async def get_storage(self) -> ShardStorage | None:
        """Return views of vLLM's parameters, for resharding to write into while paused.

        Call it before the first version; afterwards use `activate_version` instead of
        `load_weights`. Returns None if vLLM's layout differs from the checkpoint's, so that weights
        must go through `load_weights`. Raises GenerationError if the engine dies or finishes no
        step within `request_timeout_s`.
        """
        self._pending.check_alive()
        storage: ShardStorage | None = await self._call_thread(
            self._thread.request_storage, "storage"
        )
        return storage

    async def activate_version(self, version: int) -> WeightLoadStats:
        """Serve `version`, whose parameters resharding has written into the views of `get_storage`.

        Raises as `load_weights` does.
        """
        self._pending.check_alive()
        return await self._apply_version(version, lambda: self._thread.load_weights(None, version))

    async def use_model_dir(self, version: int) -> None:
        """Serve the weights of the model directory as `version`, for engines without a trainer.

        Raises as `load_weights` does.
        """
        self._pending.check_alive()
        await self._apply_version(version, lambda: self._thread.use_model_dir(version))

    def _check_tokens(self, token_ids: Array) -> None:
        """Raise an error unless the engine can run a prompt or sequence, int32 [T]."""
        self._pending.check_alive()
        if self._newest_version < 0:
            raise WeightsError("the engine has no weights yet: load a version first")
        if not 0 < len(token_ids) < self._spec.max_length:
            raise ConfigError(
                f"a prompt of {len(token_ids)} tokens: must have at least one token and be shorter"
                f" than the maximum length {self._spec.max_length}"
            )
        vocab_size = self._pending.model_info.vocab_size
        if not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
            raise ConfigError(
                f"a prompt with token ids {token_ids.min()} to {token_ids.max()}: the model has "
                f"{vocab_size} tokens"
            )


def _validate_seeds(seeds: Sequence[int]) -> None:
    if not seeds or not 0 <= min(seeds) <= max(seeds) <= MAX_SEED:
        raise ValueError(f"seeds={list(seeds)}: needs at least one, all from 0 to {MAX_SEED}")


def _make_sequence_request(
    index: int, rollout: Rollout, max_new_tokens: int, seed: int, num_prompt: int
) -> SequenceRequest:
    """Return the request that continues a rollout of a prompt of `num_prompt` tokens."""
    num_sampled = len(rollout.token_ids) - num_prompt
    seed = derive_continuation_seed(seed, num_sampled)
    return SequenceRequest(index, rollout.token_ids.tolist(), seed, max_new_tokens, num_sampled)
