"""Everything streamrl says to vLLM: an engine built, asked, given weights and shut down.

vLLM is imported by whoever calls these functions, not with this module; all calls for one engine
must come from one thread.
"""

import logging
import os
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from streamrl.engines.generator_config import GeneratorConfig, Sampling, engine_arguments
from streamrl.engines.models.forward import load_skeleton
from streamrl.engines.vllm.load_check import LoadWarnings
from streamrl.engines.vllm.partial_weights import PartWeights
from streamrl.engines.vllm.rank_groups import Team
from streamrl.engines.vllm.stop_conditions import StopRules
from streamrl.engines.vllm.weight_loader import ServedWeights, plain_linears
from streamrl.engines.vllm.worker_weights import SplitWeights, drop_names, has_lost_a_rank
from streamrl.errors import GenerationError
from streamrl.messages import FinishReason
from streamrl.resharding.storage import Storage
from streamrl.weights import Arrival, Loaded
from streamrl.weights.parameters import ParameterSet

if TYPE_CHECKING:
    from streamrl.engines.vllm.executor import FollowingWorker

#: vLLM's LLMEngine.
Engine = Any

_PROCESS = threading.Lock()
#: Of the process's only engine.
LOAD_WARNINGS = LoadWarnings()


@dataclass(frozen=True)
class EngineSpec:
    """What it takes to build an engine; `max_length` is in tokens, prompt and completion.

    When new weights come, what runs is interrupted: its keys and values are computed anew by them,
    unless it `keeps_kv`. An engine that `drains` lets it run to its end under the old ones first.
    Where ranks that are there share it, `team` says which; else a split engine starts its own.
    """

    model_path: str
    config: GeneratorConfig
    seed: int
    max_length: int
    drains: bool = False
    keeps_kv: bool = False
    team: Team | None = None


@dataclass(frozen=True)
class ModelFacts:
    """What a model directory says: parameters, by their names in transformers, and tokens."""

    parameters: ParameterSet
    vocab_size: int


@dataclass(frozen=True)
class Draw:
    """One rollout to sample: what comes before it, and how many tokens at most.

    `index` is its place in its request; the last `num_sampled` tokens were sampled before.
    """

    index: int
    token_ids: list[int]
    seed: int
    max_new_tokens: int
    num_sampled: int = 0


@dataclass(frozen=True)
class SampleRequest:
    """What is sampled together, under a number that the answers carry.

    With `scores_prompt` the answers bring the logprobs of what comes before, too.
    """

    number: int
    draws: tuple[Draw, ...]
    sampling: Sampling
    scores_prompt: bool = False


@dataclass(frozen=True)
class Sampled:
    """What was sampled of one draw of a request: token ids, with logprob and version each.

    `prompt_logprobs` has one entry for each token before, except the first, if it was asked for.
    """

    number: int
    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: FinishReason
    prompt_logprobs: Sequence[float] = ()


class Weights(Protocol):
    """The parameters of an engine, see `ServedWeights`."""

    def put(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, Arrival]: ...

    def storage(self) -> Storage | None: ...


def request_name(number: int, index: int) -> str:
    """What vLLM calls one draw of a request."""
    return f"{number}:{index}"


@contextmanager
def only_engine_of_the_process() -> Iterator[None]:
    """Two engines stepped by two threads corrupt each other: vLLM's forward context is global."""
    if not _PROCESS.acquire(blocking=False):
        raise RuntimeError("this process has a generation engine already; vLLM allows one")
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM makes it do nothing
        _PROCESS.release()


def read_model_facts(model_path: str) -> ModelFacts:
    """What a model directory holds, without reading its weights."""
    model = load_skeleton(model_path)
    return ModelFacts(ParameterSet.of(model), model.config.get_text_config().vocab_size)


def build_engine(spec: EngineSpec) -> Engine:
    """A vLLM engine in this process, whose environment must be that of `generation_env`.

    One that is split computes in processes of its own, which end with this one, or in those of its
    team, of which this one leads.
    """
    arguments = _arguments(spec)
    from vllm.v1.engine.llm_engine import LLMEngine

    with _plain_on_cpu():
        engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
    if spec.config.tensor_parallel > 1 and spec.team is None and _is_on_cpu():
        drop_names(engine)
    return engine


def build_follower(spec: EngineSpec) -> "FollowingWorker":
    """The worker of a rank that shares the engine of another, which is built meanwhile."""
    assert spec.team is not None
    arguments = _arguments(spec)
    from streamrl.engines.vllm.executor import FollowingWorker

    with _plain_on_cpu():
        return FollowingWorker(arguments.create_engine_config(), spec.team)


def _arguments(spec: EngineSpec) -> Any:
    """vLLM's EngineArgs."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise RuntimeError("generation_env() must be in the environment before vLLM is imported")
    # What vLLM would do itself, if all loggers of the process were its own to configure.
    logger = logging.getLogger("vllm")
    logger.setLevel(logging.WARNING)
    logger.handlers, logger.propagate = [LOAD_WARNINGS], False
    with warnings.catch_warnings():
        # Of its own imports; nothing a user could act on.
        warnings.simplefilter("ignore", FutureWarning)
        from vllm.engine.arg_utils import EngineArgs
    arguments = engine_arguments(
        spec.model_path,
        spec.config,
        seed=spec.seed,
        max_length=spec.max_length,
        on_cpu=_is_on_cpu(),
    )
    if spec.team is not None:
        from streamrl.engines.vllm.executor import team_arguments

        arguments |= team_arguments(spec.team, spec.config.request_timeout_s)
    return EngineArgs(**arguments)


def _is_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _plain_on_cpu() -> AbstractContextManager[None]:
    return plain_linears() if _is_on_cpu() else nullcontext()


def served_weights(engine: Engine, spec: EngineSpec, parameters: ParameterSet) -> Weights:
    """What puts new weights into an engine that was just built."""
    if spec.team is not None:
        worker = engine.model_executor.driver_worker.worker
        return PartWeights(worker, parameters, spec.model_path, spec.team)
    if spec.config.tensor_parallel > 1:
        return SplitWeights(engine, parameters, spec.model_path)
    return ServedWeights(engine, parameters, spec.model_path)


def add_request(engine: Engine, request: SampleRequest, stops: StopRules) -> str | None:
    """Queue the draws of a request; if vLLM refuses one, queue none and return the reason."""
    from vllm.exceptions import VLLMClientError

    salt = _cache_salt(engine)
    try:
        for draw in request.draws:
            prompt = {
                "type": "token",
                "prompt_token_ids": list(draw.token_ids),
                "cache_salt": salt,
            }
            name = request_name(request.number, draw.index)
            params = _sampling_params(request, draw, stops.token_ids)
            internal_name = engine.add_request(name, prompt, params)
            sampled = draw.token_ids[len(draw.token_ids) - draw.num_sampled :]
            if detokenizer := stops.make_detokenizer(sampled):
                engine.output_processor.request_states[internal_name].detokenizer = detokenizer
    except (VLLMClientError, ValueError) as error:
        engine.abort_request([request_name(request.number, draw.index) for draw in request.draws])
        return str(error)
    return None


def step(engine: Engine) -> list[Sampled]:
    """One more token of each rollout that runs; the rollouts this finished."""
    return [_sampled(output) for output in engine.step() if output.finished]


@contextmanager
def naming_lost_ranks(engine: Engine) -> Iterator[None]:
    """What fails in here since a process of a split engine has died says so."""
    try:
        yield
    except RuntimeError as error:
        if has_lost_a_rank(engine):
            raise GenerationError("a process of the split engine has died") from error
        raise


def begun(engine: Engine, numbers: Collection[int]) -> list[Sampled]:
    """What is sampled so far of the unfinished draws of some requests, if anything is."""
    from vllm.v1.engine import FinishReason as VllmFinishReason

    # Read where vLLM keeps them: to have every step tell would cost at every step.
    outputs = [
        state.make_request_output([], None, VllmFinishReason.ABORT, None)
        for state in _begun_states(engine)
        if int(state.external_req_id.split(":")[0]) in numbers
    ]
    return [_sampled(output) for output in outputs]


def load_weights(
    engine: Engine,
    weights: Weights,
    tensors: Mapping[str, torch.Tensor] | None,
    version: int,
    *,
    keeps_kv: bool,
) -> Loaded:
    """Put a full set of parameters into the model, going through it once, between two steps.

    Without `tensors` they have been changed where they lie. If this raises, the model is half old
    and half new.
    """
    began = time.monotonic()
    interrupted = len(_begun_states(engine))
    copied_bytes, arrival = (0, Arrival()) if tensors is None else weights.put(tensors)
    label_weights(engine, version)
    if keeps_kv:
        # The cache cannot be emptied while rollouts run; who starts now must not find it.
        _salt_waiting(engine)
    else:
        # Running rollouts go back to the queue and are prefilled anew: no key or value of the old
        # weights is left, neither theirs nor a cached prefix.
        engine.reset_prefix_cache(reset_running_requests=True)
    arrival = replace(arrival, warnings=LOAD_WARNINGS.drain())
    return Loaded(time.monotonic() - began, interrupted, copied_bytes, arrival)


def label_weights(engine: Engine, version: int) -> None:
    """From the next token on, tokens are sampled by `version`."""
    engine.engine_core.set_weight_version(str(version))


def shut_down(engine: Engine) -> None:
    """Free what the engine holds, torch.distributed's default group included."""
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def _cache_salt(engine: Engine) -> str:
    """Prefixes are shared only among those who have the same: one for each version."""
    return f"version {engine.engine_core.get_weight_version()}"


def _salt_waiting(engine: Engine) -> None:
    """Those who wait and have no token yet look for prefixes of the version served now.

    They were added under an older one, whose prefixes may still be in the cache.
    """
    salt = _cache_salt(engine)
    for request in engine.engine_core.engine_core.scheduler.waiting:
        if request.num_output_tokens == 0:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()


def _begun_states(engine: Engine) -> list[Any]:
    """What vLLM keeps of each request that has a token and is not finished."""
    states = engine.output_processor.request_states.values()
    return [state for state in states if state.detokenizer.num_output_tokens()]


def _sampling_params(request: SampleRequest, draw: Draw, stop_token_ids: Sequence[int]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        seed=draw.seed,
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        top_k=request.sampling.top_k,
        stop_token_ids=list(stop_token_ids),
        max_tokens=draw.max_new_tokens,
        logprobs=0,
        # With it, vLLM reads no cached prefix: there would be no logprobs of it.
        prompt_logprobs=0 if request.scores_prompt else None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # Nobody else has these parameters; a deep copy costs as much as the rest of an add.
        skip_clone=True,
    )


def _sampled(output: Any) -> Sampled:
    """One RequestOutput, which may be unfinished, as what it is to us."""
    completion = output.outputs[0]
    number, index = output.request_id.split(":")
    versions: list[int] = []
    for span in completion.weight_versions:
        versions += [int(span.version)] * (span.end - span.start)
    return Sampled(
        number=int(number),
        index=int(index),
        # Lists that vLLM goes on to fill.
        token_ids=tuple(completion.token_ids),
        logprobs=tuple(completion.logprobs.logprobs),
        versions=versions,
        finish_reason=FinishReason[completion.finish_reason.upper()],
        prompt_logprobs=output.prompt_logprobs.logprobs if output.prompt_logprobs else (),
    )
