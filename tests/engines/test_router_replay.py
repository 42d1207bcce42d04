"""A real engine returns the experts that the trainer's model would choose, in float32."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from streamrl.engines.generation.generation_engine import ProgressWatch
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.models.forward import compute_token_logprobs, iter_layers
from streamrl.engines.models.router_replay import Routing, enable_router_replay
from streamrl.messages import Rollout, columns_to_rollouts
from tests.engines.flight import start_engine
from tests.engines.test_architectures import make_model
from tests.engines.tiny_qwen import prompt, weights_of

pytestmark = [
    pytest.mark.xdist_group("engines"),
    pytest.mark.usefixtures("no_engine"),
    pytest.mark.slow,
]


@torch.no_grad()
def count_differences(model: PreTrainedModel, rollout: Rollout) -> tuple[int, int]:
    """Return how many choices of experts differ from the model's, and all that are known."""
    ids = torch.from_numpy(rollout.token_ids).long()[None]
    routing = Routing(torch.from_numpy(rollout.wide["routed_experts"])[None], replays=False)
    compute_token_logprobs(model, ids, ids >= 0, temperature=1.0, routing=routing)
    return int(routing.sums["num_rerouted"]), int(routing.sums["num_routed"])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.asyncio(loop_scope="session")
async def test_an_engine_returns_the_experts_of_all_tokens_but_the_last(
    family: str, tmp_path: Path
):
    models = [make_model(family, tmp_path, seed=1)]
    models.append(make_model(family, tmp_path / "other", seed=2))
    # vLLM keeps the buffers of the directory, such as the biases of routers.
    stored = models[0].state_dict()
    buffers = {name: b for name, b in models[0].named_buffers() if name in stored}
    models[1].load_state_dict(buffers, strict=False)
    for model in models:
        enable_router_replay(model, iter_layers(model))
    config = GeneratorConfig(max_new_tokens=40, max_concurrent_rollouts=8)
    async with start_engine(str(tmp_path), config, returns_experts=True) as engine:
        await engine.load_weights(weights_of(models[0]), 0)
        # Long enough that full blocks of the prompt come from the prefix cache.
        long = prompt(*(3 + i % 50 for i in range(150)))
        rollouts = [r for _ in range(2) for r in await engine.generate(long, seeds=[1, 2])]
        for rollout in rollouts:
            experts = rollout.wide["routed_experts"]
            layers = [1] if family == "deepseek_v3" else [0, 1]
            num_known = len(layers) * (len(rollout.token_ids) - 1)
            assert (experts[-1] == 255).all() and (experts[:-1] < 4).all()
            assert count_differences(models[0], rollout) == (0, num_known)
        # Rollouts that go on with new weights have the experts that these choose.
        call = asyncio.create_task(
            engine.generate(long, seeds=[5, 6], watch=ProgressWatch("a"), max_new_tokens=200)
        )
        while not (partials := await engine.collect_partial_rollouts()):
            await asyncio.sleep(0.01)
        await engine.load_weights(weights_of(models[1]), 1)
        done = await call
        begun = columns_to_rollouts(partials["a"])
        assert {r.policy_version.max() for r in done} == {1}
        resumed = await engine.generate(
            long, seeds=[5, 6], partial_rollouts=begun, max_new_tokens=60
        )
        for rollout in (*done, *resumed):
            assert np.isin(0, rollout.policy_version)
            assert count_differences(models[1], rollout)[0] == 0
