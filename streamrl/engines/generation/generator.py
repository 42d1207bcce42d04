"""Rollouts from vLLM: token ids in, sampled tokens with their logprobs and versions out.

One engine lives in the calling process, stepped by a thread of its own (`vllm_thread`); this is its
asyncio front. New weights are applied between two steps while rollouts run on: what was sampled
keeps its version, and what comes next is sampled by the new weights. What the engine knows of the
tokens before is computed anew by the new weights, unless it keeps it; or the rollouts are ended
first, if it drains.
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

#: Larger seeds do not fit where vLLM keeps them, and -1 would mean none.
MAX_SEED = 2**63 - 1


class GenerationEngine(EngineClient):
    """One replica of the policy that samples; belongs to the event loop it was started on.

    It serves nothing before the first `load_weights`. Many calls may run at once. When the engine
    dies, every pending and every later call raises GenerationError.
    """

    @classmethod
    async def start(
        cls,
        model_path: str,
        config: GeneratorConfig,
        *,
        seed: int,
        max_length: int,
        drains: bool = False,
        keeps_kv: bool = False,
    ) -> "GenerationEngine":
        """Build the engine of a model directory in this process, which needs `make_vllm_env`.

        `max_length` bounds prompt and completion together, in tokens; `seed` is the engine's own
        (each rollout has one besides); `drains` and `keeps_kv` say what becomes of rollouts when
        new weights come, see `load_weights`. Takes seconds. Raises ConfigError if vLLM refuses the
        settings, DeadlineError after `start_timeout_s`, GenerationError if the engine dies.
        """
        return await cls.start_from_spec(
            EngineSpec(model_path, config, seed, max_length, drains, keeps_kv)
        )

    @classmethod
    async def start_from_spec(cls, spec: EngineSpec) -> "GenerationEngine":
        """As `start`. With a team this process leads it, and must be one that does.

        The others have a `FollowerRank` each; all ranks of all teams start together.
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
            if engine._pending.started.cancelled():  # nobody waits for it any more
                engine._thread.stop()
        return engine

    async def generate(
        self,
        prompt_ids: Array,
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings | None = None,
        max_new_tokens: int | None = None,
        begun: Sequence[Rollout] = (),
        watch: ProgressWatch | None = None,
    ) -> list[Rollout]:
        """One rollout of a prompt, int32 [P], for each seed, in the seeds' order.

        A seed gives the same tokens whatever else the engine does, while the version stays the
        same (up to rounding: the order of sums depends on the batch). Logprobs are those of the
        sampling distribution, by `sampling` or the generator's temperature; at temperature 0 they
        are those of 1. A rollout ends with the model's end-of-sequence token, a stop token or the
        token that completes a stop text, which is part of it, or for length.

        `begun` is what there is already of the rollout of each seed, if anything is: one that is
        finished is returned as it is, the others go on where they were broken off, keep what they
        have and are as long as they would have been. What they go on with is drawn with
        `derive_continuation_seed`, not as it would have been without the break. `watch` is told
        what becomes of them meanwhile.

        Raises ConfigError for a prompt or setting the model cannot take, WeightsError before the
        first version, DeadlineError after `request_timeout_s` and GenerationError if the engine
        dies.
        """
        self._check_tokens(prompt_ids)
        _validate_seeds(seeds)
        config = self._spec.config
        limit = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        found = resolve_partials(prompt_ids, begun, num_rollouts=len(seeds))
        rooms = [
            count_remaining_tokens(
                r,
                num_prompt=len(prompt_ids),
                max_new_tokens=limit,
                max_length=self._spec.max_length,
            )
            for r in found
        ]
        found = [r if room else finish_by_length(r) for r, room in zip(found, rooms, strict=True)]
        draws = tuple(
            _make_sequence_request(index, rollout, rooms[index], int(seeds[index]), len(prompt_ids))
            for index, rollout in enumerate(found)
            if rooms[index]
        )
        group = PendingGroup(found, [draw.index for draw in draws], watch)
        if draws:
            how = sampling or SamplingSettings(config.temperature)
            await self._run_request(SamplingRequest(self._next_request_id(), draws, how), group)
        return group.build_rollouts()

    async def collect_partial_rollouts(self) -> dict[str, list[Rollout]]:
        """What there is of the rollouts of every watched call, by name, in the order of its seeds.

        Those that are finished are whole; the others end with FinishReason.ABORT, some after the
        prompt. All of them are as they were between two steps. Of two calls of one name it tells
        of the later. Raises GenerationError if the engine dies, or ends no step within
        `request_timeout_s`.
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
        """The version that is served and what it makes of these sequences, int32 [T] each.

        That is the logprob of each token at temperature 1, float32 [T]; 0 for the first, which
        nothing comes before. Nothing is drawn from a cache. Raises as `generate` does, but for
        GenerationError, the engine dead, after `request_timeout_s`; a sequence must be one token
        shorter than the maximum length.
        """
        for sequence in sequences:
            self._check_tokens(sequence)
        while True:
            held = self.version
            logprobs = [np.zeros(len(sequence), np.float32) for sequence in sequences]
            draws = tuple(
                SequenceRequest(index, sequence.tolist(), 0, max_new_tokens=1)
                for index, sequence in enumerate(sequences)
            )
            if not draws:
                return held, logprobs
            request = SamplingRequest(
                self._next_request_id(), draws, SamplingSettings(0.0), should_score_prompt=True
            )
            begun = [make_empty_rollout(sequence) for sequence in sequences]
            group = PendingGroup(begun, range(len(draws)))
            try:
                await self._run_request(request, group)
            except DeadlineError as error:
                raise self._fail_engine(f"a probe was not answered: {error}") from error
            for index, sampled in group.sampled_sequences.items():
                logprobs[index][1:] = sampled.prompt_logprobs
            # If weights came meanwhile, some may be of one version and some of another.
            if all(sampled.versions == [held] for sampled in group.sampled_sequences.values()):
                return held, logprobs

    async def load_weights(
        self, tensors: Mapping[str, torch.Tensor | Array], version: int
    ) -> WeightLoadStats:
        """Sample with these parameters from the next token on, and call them `version`.

        `tensors` are all parameters by their names in transformers (of tied ones, one is enough),
        or what a trainer of adapters publishes, to be merged into the model directory's weights.
        They are used where they lie if they can be, and must stay unchanged until a later version
        is served; they are never written to.

        Rollouts run on. Their keys and values are computed anew by the new weights; an engine that
        `keeps_kv` goes on with those of the old ones. One that `drains` ends first what it was
        asked for before, and starts nothing meanwhile.

        Raises WeightsError, the engine unharmed, if the version is not newer than the last one or
        a parameter is missing, unknown or of another shape; WeightsError, the engine dead, if vLLM
        fails half-way; GenerationError, the engine dead, after `request_timeout_s` (twice that if
        it drains).
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
        """Where the parameters lie, for others to fill while it stands still; `take_up` then.

        To be asked for before the first version; none is to be given to `load_weights` then. None
        if they have to be given to it, as vLLM does not keep them as the checkpoint does. Raises
        GenerationError if the engine dies, or ends no step within `request_timeout_s`.
        """
        self._pending.check_alive()
        found: ShardStorage | None = await self._call_thread(
            self._thread.request_storage, "storage"
        )
        return found

    async def activate_version(self, version: int) -> WeightLoadStats:
        """As `load_weights`, of a version that has been filled into its storage."""
        self._pending.check_alive()
        return await self._apply_version(version, lambda: self._thread.load_weights(None, version))

    async def use_model_dir(self, version: int) -> None:
        """Sample with the weights of the model directory, and call them `version`.

        For those who follow no trainer. Raises as `load_weights` does.
        """
        self._pending.check_alive()
        await self._apply_version(version, lambda: self._thread.use_model_dir(version))

    def _check_tokens(self, token_ids: Array) -> None:
        self._pending.check_alive()
        if self._newest_version < 0:
            raise WeightsError("the engine holds no version of the weights yet")
        if not 0 < len(token_ids) < self._spec.max_length:
            raise ConfigError(
                f"a prompt of {len(token_ids)} tokens: must have at least one and leave room for "
                f"another below the maximum length {self._spec.max_length}"
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
    index: int, rollout: Rollout, num_new: int, seed: int, num_prompt: int
) -> SequenceRequest:
    """What is to be sampled of a rollout that has room for `num_new` tokens more."""
    num_sampled = len(rollout.token_ids) - num_prompt
    seed = derive_continuation_seed(seed, num_sampled)
    return SequenceRequest(index, rollout.token_ids.tolist(), seed, num_new, num_sampled)
