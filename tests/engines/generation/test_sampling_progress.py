"""How long a request may take: any time with progress, `request_timeout_s` without it.

And how long a load may: `request_timeout_s` and the time of its bytes, in which the engine counts
as alive although it answers nothing.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm.requests import (
    EngineSpec,
    ModelInfo,
    SampledSequence,
    SamplingRequest,
    TokenCount,
)
from streamrl.errors import GenerationError
from streamrl.messages import FinishReason, Rollout
from streamrl.weights import WeightLoadStats
from streamrl.weights.parameters import ParameterSet
from streamrl.weights.transport import MIN_BYTES_PER_S
from tests.virtual_time import in_virtual_time

TIMEOUT_S = 600.0
STATS = WeightLoadStats()
PROMPT = np.array([1, 2, 3], np.int32)


class ScriptedThread:
    """Engine in virtual time: decodes the first unfinished sequence, a token every `token_s`.

    stops_after: number of tokens after which it samples no more.
    hangs_after: number of tokens after which its step does not end, so that it answers nothing.
    load_s: time of a load of weights.
    """

    _loop: asyncio.AbstractEventLoop
    _on_sampled: Callable[[Sequence[SampledSequence]], None]
    create_future: Callable[[], asyncio.Future[Any]]
    _resolve: Callable[[asyncio.Future[Any], Any], None]
    token_s, load_s = 4.0, 0.0
    stops_after = hangs_after = 10**9

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.version = 0
        self._counts: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        self._num_tokens = 0
        self._is_paused = False

    def add_requests(self, requests: Sequence[SamplingRequest]) -> None:
        for request in requests:
            for sequence in request.sequences:
                name = f"{request.request_id}:{sequence.index}"
                self._counts[name], self._limits[name] = 0, sequence.max_new_tokens
        self._loop.create_task(self._decode())

    async def _decode(self) -> None:
        while self._counts and self._num_tokens < min(self.stops_after, self.hangs_after):
            await asyncio.sleep(self.token_s)
            name = next(iter(self._counts), None)
            if name is None or self._is_paused:
                continue
            self._counts[name] += 1
            self._num_tokens += 1
            if self._counts[name] == self._limits[name]:
                count = self._counts.pop(name)
                number, index = map(int, name.split(":"))
                sampled = [7] * count, [-1.0] * count, [0] * count
                self._on_sampled([SampledSequence(number, index, *sampled, FinishReason.LENGTH)])

    def count_tokens(self) -> asyncio.Future[dict[str, TokenCount]]:
        future = self.create_future()
        if self._num_tokens < self.hangs_after:
            running = next(iter(self._counts), None)
            future.set_result({n: TokenCount(c, n == running) for n, c in self._counts.items()})
        return future

    def swap_weights(self, tensors: Any, version: int) -> asyncio.Future[WeightLoadStats]:
        future = self.create_future()
        self._loop.call_later(self.load_s, self._resolve, future, STATS)
        return future

    def list_partials(self, request_ids: Any) -> asyncio.Future[Sequence[SampledSequence]]:
        return self.create_future()

    def pause(self) -> asyncio.Future[None]:
        self._is_paused = True
        future = self.create_future()
        future.set_result(None)
        return future

    def resume(self) -> None:
        self._is_paused = False

    def abort_sequences(self, request_id: int, indices: Sequence[int]) -> None:
        for index in indices:
            self._counts.pop(f"{request_id}:{index}", None)


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes an engine whose thread behaves as its arguments say."""

    def make(**behaviour: Any) -> GenerationEngine:
        from streamrl.engines.vllm.engine import EngineThread  # loads vLLM

        thread = type("Thread", (ScriptedThread, EngineThread), behaviour)
        monkeypatch.setattr("streamrl.engines.vllm.engine.EngineThread", thread)
        monkeypatch.setattr(GeneratorConfig, "request_timeout_s", TIMEOUT_S)
        engine = GenerationEngine(EngineSpec("model", GeneratorConfig(), 10**5))
        engine._model_info = ModelInfo(ParameterSet({}, ()), 100)
        engine._thread._started.set_result(engine._model_info)
        engine._newest_version = 0
        return engine

    return make


async def generate(engine: GenerationEngine, num: int, num_tokens: int) -> list[Rollout]:
    return await engine.generate(PROMPT, seeds=range(num), max_new_tokens=num_tokens)


@in_virtual_time
async def test_rollouts_that_grow_or_wait_for_others_take_many_times_the_timeout(make_engine: Any):
    engine = make_engine()
    groups = [asyncio.create_task(generate(engine, 2, 1000)) for _ in range(3)]
    assert [len(await group) for group in groups] == [2, 2, 2]
    assert asyncio.get_running_loop().time() == 6 * 1000 * 4.0


@pytest.mark.parametrize("turns", range(4))
@in_virtual_time
async def test_an_engine_is_paused_in_the_moment_of_a_look(make_engine: Any, turns: int):
    engine = make_engine()
    groups = [asyncio.create_task(generate(engine, 1, 1000)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(TIMEOUT_S)
    for _ in range(turns):
        await asyncio.sleep(0)
    await engine.pause("lease")
    await asyncio.sleep(5 * TIMEOUT_S)
    await engine.resume("lease")
    assert [len(await group) for group in groups] == [1, 1, 1]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (
            {"stops_after": 300},
            r"generate: 1 of 1 rollouts of a prompt of 3 tokens are not finished: no token was"
            r" sampled for 600 s; the engine serves version 0",
        ),
        ({"hangs_after": 300}, r"of 3 tokens are not finished: .* did not end a step in 600 s"),
    ],
)
@in_virtual_time
async def test_an_engine_without_progress_fails_all_its_calls(
    make_engine: Any, behaviour: dict[str, int], reason: str
):
    engine = make_engine(**behaviour)
    groups = [asyncio.create_task(generate(engine, 1, 1000)) for _ in range(2)]
    errors = await asyncio.gather(*groups, return_exceptions=True)
    assert [type(error) for error in errors] == [GenerationError] * 2
    stopped_at = 300 * 4.0
    assert stopped_at + TIMEOUT_S <= asyncio.get_running_loop().time() <= stopped_at + 2 * TIMEOUT_S
    with pytest.raises(GenerationError, match=reason):
        await generate(engine, 1, 1)


@pytest.mark.parametrize("is_lost", [False, True])
@in_virtual_time
async def test_a_request_that_no_longer_grows_fails_although_others_do(
    make_engine: Any, is_lost: bool
):
    engine = make_engine()
    stuck = asyncio.create_task(generate(engine, 1, 1000))
    await asyncio.sleep(10.0)
    counts = {} if is_lost else {"1:0": TokenCount(2, is_running=True)}

    def count_tokens() -> asyncio.Future[dict[str, TokenCount]]:
        counts["2:0"] = TokenCount(int(asyncio.get_running_loop().time()), is_running=True)
        future = engine._thread.create_future()
        future.set_result(dict(counts))
        return future

    engine._thread.count_tokens = count_tokens
    with pytest.raises(GenerationError, match="no token was sampled for 600 s"):
        await stuck


@pytest.mark.parametrize("gigabytes", [1, 60])
@pytest.mark.parametrize("over_s", [-1.0, 1.0])
@in_virtual_time
async def test_a_load_may_take_the_timeout_and_the_time_of_its_bytes(
    make_engine: Any, gigabytes: int, over_s: float
):
    engine = make_engine(load_s=TIMEOUT_S + gigabytes * 1e9 / MIN_BYTES_PER_S + over_s)
    shape = (gigabytes * 250_000_000,)
    engine._model_info = ModelInfo(ParameterSet({"weight": shape}, ()), 100)
    load = asyncio.create_task(
        engine.load_weights({"weight": torch.empty(shape, device="meta")}, 1)
    )
    while not load.done():
        async with asyncio.timeout(1.0):
            await engine.wait_until_responsive()
        await asyncio.sleep(20.0)
    if over_s > 0:
        with pytest.raises(
            GenerationError, match=r"version 1 was not loaded: .* did not end a step"
        ):
            await load
    else:
        assert await load == STATS


@in_virtual_time
async def test_an_engine_that_answers_nothing_counts_as_alive_only_while_it_loads(make_engine: Any):
    engine = make_engine(load_s=5.0)
    load = asyncio.create_task(engine.load_weights({}, 1))
    await asyncio.sleep(1.0)
    await engine.wait_until_responsive()
    await load
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(TIMEOUT_S / 2):
            await engine.wait_until_responsive()
