"""Arguments and results of a vLLM engine, its import and deadlines; loads no vLLM itself."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from streamrl.engines.generator_config import GeneratorConfig, SamplingSettings
from streamrl.engines.vllm.rank_groups import RankGroup
from streamrl.errors import ConfigError, DeadlineError
from streamrl.messages import Array, FinishReason
from streamrl.weights.parameters import ParameterSet


@dataclass(frozen=True)
class EngineSpec:
    """Arguments for building a vLLM engine of a model directory.

    `max_length` bounds prompt plus completion, in tokens. A weight load recomputes the KV cache of
    running rollouts, unless `should_keep_kv`. `rank_group` places a tensor-parallel engine on
    existing trainer ranks; without it, vLLM starts its own processes. With `starts_empty` the model
    directory's weights are not read: the first version has them. `seed` seeds vLLM itself; the
    seeds of a group's `group_size` rollouts derive from `run_seed`. With `returns_experts`,
    rollouts have the experts of their tokens.
    """

    model_path: str
    config: GeneratorConfig
    max_length: int
    seed: int = 0
    should_keep_kv: bool = False
    rank_group: RankGroup | None = None
    starts_empty: bool = False
    group_size: int = 1
    run_seed: int = 0
    returns_experts: bool = False


@asynccontextmanager
async def raise_after(timeout_s: float, message: str) -> AsyncIterator[None]:
    """Raise DeadlineError with the message if the context takes longer than `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise DeadlineError(f"{message} within {timeout_s:g} s") from error


async def import_vllm(module: str, spec: EngineSpec) -> Any:
    """Import a module of this package and with it vLLM, which takes seconds, on another thread.

    Raises ConfigError if vLLM cannot be imported, DeadlineError after `start_timeout_s`.
    """
    # Users cannot act on warnings of the import; an engine sets the level anew.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    late = f"vLLM did not start {spec.model_path}"
    try:
        async with raise_after(spec.config.start_timeout_s, late):
            return await asyncio.to_thread(import_module, f"streamrl.engines.vllm.{module}")
    except (ImportError, OSError) as error:
        raise ConfigError(f"generator: vLLM cannot start {spec.model_path}: {error}") from error


@dataclass(frozen=True)
class ModelInfo:
    """Parameters of a model directory, by their transformers names, and its vocabulary size."""

    parameters: ParameterSet
    vocab_size: int


@dataclass(frozen=True)
class SequenceRequest:
    """A rollout to sample, as sent to the engine: prefix, seed and number of new tokens.

    `index` is the position of the rollout in its request. `token_ids` is the prefix: the prompt and
    `num_sampled` tokens of a partial rollout.
    """

    index: int
    token_ids: list[int]
    seed: int
    max_new_tokens: int
    num_sampled: int = 0


@dataclass(frozen=True)
class SamplingRequest:
    """Rollouts of a prompt to sample with the same settings; results carry `request_id`.

    With `should_score_prompt`, results also contain the logprobs of the prefix. `stop_token_ids`
    end a rollout besides those of the engine. With `num_mask_words`, results contain the words that
    sampling could draw, at most so many for each token.
    """

    request_id: int
    sequences: tuple[SequenceRequest, ...]
    sampling: SamplingSettings
    should_score_prompt: bool = False
    stop_token_ids: tuple[int, ...] = ()
    num_mask_words: int = 0


@dataclass(frozen=True)
class SampledSequence:
    """Tokens that the engine has newly sampled for a rollout, with their logprobs and versions.

    `prompt_logprobs` has an entry for each token of the prefix except the first, if requested.
    `wide` holds rows of wide columns, those of the last tokens.
    """

    request_id: int
    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: FinishReason
    prompt_logprobs: Sequence[float] = ()
    wide: Mapping[str, Array] = field(default_factory=dict)


class TokenCount(NamedTuple):
    """Number of tokens that the engine has sampled for a sequence; whether it decodes it now.

    Otherwise the sequence waits in vLLM's queue, because it is new or was preempted.
    """

    num_tokens: int
    is_running: bool


def make_vllm_request_id(request_id: int, index: int) -> str:
    return f"{request_id}:{index}"
