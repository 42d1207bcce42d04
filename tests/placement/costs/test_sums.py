"""Sums of memory: whose micro-batches count, what is said to be too much, and what stays."""

import re
from dataclasses import replace

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.placement import Cluster, FixedLength, Placement, PlacementProblem, Workload
from streamrl.placement.clusters import GB
from streamrl.placement.costs import CostConstants, CostModel
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import MODEL_SHAPES
from streamrl.placement.placements import CallAssignment
from streamrl.resharding import RankGrid

GRPO = build_dataflow(("scores", "ref_logprobs", "generator_logprobs"))
SHAPE = MODEL_SHAPES["llama-7b"]
WORK = Workload(256, 8, 512, FixedLength(512), micro_batch_tokens=8192)
RUN = CostConstants(keeps_served=True, aliases_served=False, keeps_kv=True)
"""As streamrl runs on GPUs."""


def problem(**changes: object) -> PlacementProblem:
    base = PlacementProblem(
        GRPO, {"policy": SHAPE, "reference": SHAPE}, WORK, Cluster.from_text("8xA100")
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def together(devices: int = 8) -> Placement:
    one = CallAssignment(Mesh(0, devices), RankGrid(1, 1, devices), zero_stage=3)
    return Placement(dict.fromkeys(("generate", "train", "reference"), one))


def scored(tokens: int) -> float:
    """A layer's activations and the logits of a batch."""
    return tokens * (SHAPE.hidden * 34 + SHAPE.vocab * 8)


def test_who_scores_needs_room_for_its_own_batch_and_no_more() -> None:
    for tokens in (8192, 16384):
        costs = CostModel(problem(score_tokens={"reference": tokens}), RUN)
        assert costs.predict_memory(together())["reference"].active_bytes == pytest.approx(
            scored(tokens)
        )
    # Where nobody says, the constants do.
    costs = CostModel(problem(), RUN)
    assert costs.predict_memory(together())["reference"].active_bytes == pytest.approx(
        scored(32768)
    )


def test_training_needs_room_for_a_micro_batch_as_large_as_it_may_be() -> None:
    # 256 groups are 33 micro-batches of a replica, the last of which is small.
    costs = [
        CostModel(problem(workload=replace(WORK, micro_batch_tokens=tokens)), RUN)
        for tokens in (8192, 8192 + 512, 2 * 8192)
    ]
    active = [each.predict_memory(together())["train"].active_bytes for each in costs]
    layer = 2 * 2 * SHAPE.num_params / SHAPE.layers
    part = [each - layer for each in active]
    assert part[1] / part[0] == pytest.approx((8192 + 512) / 8192, rel=0.01)
    assert part[2] / part[0] == pytest.approx(2, rel=0.01)


def test_on_a_gpu_served_weights_are_a_copy_and_keys_and_values_stay_while_others_train() -> None:
    held = {}
    for name, constants in (("run", RUN), ("shared", CostConstants(keeps_served=True))):
        plain = Placement(
            {**together().assignments, "train": replace(together().assignments["train"])}
        )
        model = CostModel(problem(), constants)
        held[name] = (model.predict_memory(plain)["generate"], model.kv_capacity_bytes(plain))
    copy = 2 * SHAPE.num_params
    assert held["run"][0].resident_bytes > held["shared"][0].resident_bytes
    assert held["run"][0].resident_bytes == pytest.approx(copy + held["run"][1], rel=0.01)
    # What trains takes more than what scores, and so much less is left for them.
    assert held["run"][1] < held["shared"][1]


def test_a_cache_that_a_run_sets_is_what_there_is() -> None:
    given = 4 << 30
    costs = CostModel(problem(kv_cache_bytes=given), RUN)
    assert costs.explain_infeasible(together()) == ""
    assert costs.kv_capacity_bytes(together()) == costs.kv_cache_bytes(together()) == given
    tokens = costs.predict_timings(together()).generator.kv_tokens
    assert tokens == pytest.approx(given / SHAPE.kv_bytes_per_token())
    too_large = CostModel(problem(kv_cache_bytes=70 << 30), RUN).explain_infeasible(together())
    assert "generate 75.2 for keys and values," in too_large


def test_the_sum_that_is_told_is_what_is_too_much() -> None:
    large = {"policy": MODEL_SHAPES["llama-34b"], "reference": MODEL_SHAPES["llama-34b"]}
    asked = problem(models=large, score_tokens={"reference": 8192})
    why = CostModel(asked, RUN).explain_infeasible(together())
    found = re.fullmatch(
        r"devices 0-7: needs (\S+) GB per A100; (\S+) of 80.0 GB usable, (\S+) GB short:"
        r" resident (.*); active (.*)",
        why,
    )
    assert found is not None, why
    needed, room, short = (float(each) for each in found.groups()[:3])
    assert needed - room == pytest.approx(short, abs=0.11)
    numbers = [float(each) for each in re.findall(r" (\d+(?:\.\d+)?)(?= |,|$)", f"{found[4]}")]
    on_top = re.findall(r"(\w+) (\S+) (for keys and values of one rollout|for \d+ tokens)", why)
    assert sum(numbers) + sum(float(size) for _, size, _ in on_top) == pytest.approx(
        needed, abs=0.4
    )
    # What trains takes most; a rollout's keys and values are a fraction of a GB.
    sizes = {f"{stage} {what}": float(size) for stage, size, what in on_top}
    assert sizes["generate for keys and values of one rollout"] == pytest.approx(
        1024 * MODEL_SHAPES["llama-34b"].kv_bytes_per_token() / GB, abs=0.05
    )
    assert "train for 8192 tokens" in sizes
