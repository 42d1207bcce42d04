"""The trainer's update, on every backend, number of ranks and split into micro-batches."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from streamrl.algorithms import summarize_policy
from streamrl.data.pretrain_texts import TextStream
from streamrl.engines.models.forward import load_value_model
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.pretraining import PretrainingLoss
from streamrl.errors import ConfigError
from tests.engines.conftest import parametrize_layouts
from tests.engines.plain_step import (
    PlainOptimizer,
    clipped_loss,
    iter_rows,
    logprobs_of,
    measure_max_difference,
    parameters_by_name,
    plain_loss,
)
from tests.engines.tiny_qwen import EOS, tiny_model
from tests.engines.trainer_layouts import (
    CUTS,
    GATHERED,
    LAYOUTS,
    ONE,
    PAIRS,
    SAVED,
    SEVERAL_ON,
    SHARDED,
    SPLIT,
    TWO,
    Layout,
)
from tests.engines.trainer_ranks import (
    GROUPS,
    LR,
    PTX_COEF,
    PTX_DIVISORS,
    PTX_ROWS,
    SECOND_MOMENT,
    SEVERAL,
    SEVERAL_DIVISOR,
    SEVERAL_LR,
    SHARED_COEFS,
    TEMPERATURE,
    TEXTS,
    TOP_ENTROPY,
    TrainerCase,
    compute_divisor,
    sum_metrics,
)

pytestmark = pytest.mark.xdist_group("ranks")

ONE_OF_DEEPSPEED = Layout("deepspeed", 1, 1)
QUICK = [ONE, TWO, SPLIT, SHARDED, GATHERED, ONE_OF_DEEPSPEED]
"""A trainer of each kind."""
OTHER_SETTINGS = TrainerCase("other_settings", ONE_OF_DEEPSPEED)


def plain_steps(num_steps: int):
    """Compute the same steps by hand."""
    model = tiny_model(tied=True, seed=0, kv_heads=2)
    optimizer = PlainOptimizer(model.parameters(), LR)
    for _ in range(num_steps):
        (plain_loss(lambda ids: model(ids).logits) / compute_divisor(GROUPS)).backward()
        optimizer.step()
    return optimizer.norms, parameters_by_name(model)


def several_plain_updates():
    """Compute `several_updates` by hand: a single process, rollout by rollout."""
    model = tiny_model(tied=True, seed=0, kv_heads=2)
    optimizer = PlainOptimizer(model.parameters(), SEVERAL_LR)
    rows: list[dict[str, Any]] = []
    for uid, columns in GROUPS.items():
        for score, (ids, row) in zip(columns["scores"].tolist(), iter_rows(columns), strict=True):
            with torch.no_grad():
                proximal = logprobs_of(model(ids).logits, ids)["logprobs"]
            rows.append({**row, "uid": uid, "ids": ids, "score": score, "proximal": proximal})
            rows[-1]["x"] = (proximal - row["generator_logprobs"])[row["loss_mask"]]
    squares = torch.cat([row["x"] for row in rows]).double().square().sort().values
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1)
    limit = squares[means < SECOND_MOMENT].max()
    mean_weight = torch.cat([row["x"] for row in rows]).exp().clamp(max=2.0).mean()
    for row in rows:
        row["near"] = row["x"].double().square() <= limit * (1 + 1e-6)
    # Rollouts without a near token are in no baseline and in no whitening.
    included = [row for row in rows if row["near"].any()]
    assert len(included) < len(rows), "the mask takes out no whole rollout"
    for row in included:
        scores = torch.tensor([other["score"] for other in included if other["uid"] == row["uid"]])
        row["advantage"] = (row["score"] - scores.mean()) / (scores.std() + 1e-6)
    flat = torch.cat([row["advantage"].expand(len(row["x"])) for row in included])
    sums = []
    uids = list(GROUPS)
    for part in (uids[::2], uids[1::2]) * SEVERAL.epochs:
        total = []
        for row in (row for row in rows if row["uid"] in part):
            a = (row.get("advantage", flat.mean()) - flat.mean()) / (flat.var() + 1e-8).sqrt()
            outputs = logprobs_of(model(row["ids"]).logits, row["ids"])
            mask, near = row["loss_mask"], row["near"]
            r = (outputs["logprobs"] - row["proximal"])[mask].exp()
            weights = row["x"].exp().clamp(max=2.0)[near] / mean_weight
            losses = clipped_loss(r, a)[near] * weights
            loss = losses.sum() / len(near)
            (loss / SEVERAL_DIVISOR).backward()
            total.append(
                {
                    "num_tokens": len(near),
                    "num_rollouts": 1,
                    "num_kept": int(near.sum()),
                    "num_sampled": len(near),
                    "ratio_sum": row["x"].exp().sum().item(),
                    "weight_sum": weights.sum().item(),
                    "entropy_sum": outputs["entropy"][mask].sum().item(),
                    "loss_policy_sum": loss.item(),
                }
            )
        sums.append(sum_metrics(total))
        optimizer.step()
    return sums, parameters_by_name(model)


@parametrize_layouts("several_updates", on=SEVERAL_ON, quick=[ONE, GATHERED])
def test_several_updates_of_a_step_equal_a_plain_process(results, layout):
    """Covers whitening over the step, the proximal policy and the second moment mask."""
    sums, parameters = several_plain_updates()
    assert sums[0]["num_kept"] < sums[0]["num_sampled"], "the second moment mask excluded no token"
    assert sums[0]["ratio_sum"] == pytest.approx(sums[2]["ratio_sum"]), "weights are of the start"
    cases = results[f"several/{layout.label}"]
    for i, expected in enumerate(sums):
        total = sum_metrics(case["sums"][i] for case in layout.select_shares(cases))
        for name in expected:
            assert total[name] == pytest.approx(expected[name], rel=1e-3, abs=2e-3), name
    for case in cases:
        assert measure_max_difference(case["parameters"], parameters) < 0.1 * SEVERAL_LR


def plain_look():
    """Compute `first_look` by hand; return advantages by rollout, the loss and the parameters."""
    model = tiny_model(tied=True, seed=0, kv_heads=2)
    optimizer = PlainOptimizer(model.parameters(), SEVERAL_LR)
    rows: list[dict[str, Any]] = []
    for uid, columns in GROUPS.items():
        for score, (ids, row) in zip(columns["scores"].tolist(), iter_rows(columns), strict=True):
            mask = row["loss_mask"][0]
            with torch.no_grad():
                logits = model(ids).logits
                start = logprobs_of(logits, ids)
            p = (logits[0, :-1] / TEMPERATURE).softmax(-1)[mask]
            chosen = torch.nn.functional.one_hot(ids[0, 1:][mask], p.shape[-1])
            x = (start["logprobs"] - row["generator_logprobs"])[0, mask]
            weights = x.exp().clamp(max=2.0)
            # The gradient of a logprob by the logits is the choice minus the probabilities.
            energy = ((chosen - p).square().sum(-1) * weights.square()).cumsum(0)
            rows.append({"uid": uid, "ids": ids, "mask": mask, "score": score, "energy": energy})
            rows[-1] |= {"weights": weights, "start": start["logprobs"][0, mask]}
            rows[-1] |= {"entropy": start["entropy"][0, mask]}
    entropies = torch.cat([row["entropy"] for row in rows]).sort(descending=True).values
    limit = entropies[int(TOP_ENTROPY * (len(entropies) - 1))]
    total, advantages = torch.zeros(()), {}
    for i, row in enumerate(rows):
        baseline = torch.zeros(len(row["energy"]))
        for t in range(len(baseline)):
            peers = [r for r in rows if r["uid"] == row["uid"] and len(r["energy"]) > t]
            energy = torch.stack([r["energy"][t] for r in peers])
            scores = torch.tensor([r["score"] for r in peers])
            if len(peers) > 1:
                baseline[t] = (energy * scores).sum() / energy.sum()
        a = row["score"] - baseline
        advantages[i] = a.mean().item()
        now = logprobs_of(model(row["ids"]).logits, row["ids"])["logprobs"][0, row["mask"]]
        losses = clipped_loss((now - row["start"]).exp(), a) * row["weights"]
        total = total + (losses * (row["entropy"] >= limit)).sum()
    (total / SEVERAL_DIVISOR).backward()
    optimizer.step()
    return advantages, total.item(), parameters_by_name(model)


@parametrize_layouts("first_look", on=SEVERAL_ON, quick=[ONE, TWO, SPLIT])
def test_entropies_and_norms_of_scores_before_the_update_equal_a_plain_process(results, layout):
    advantages, loss, parameters = plain_look()
    cases = results[f"first_look/{layout.label}"]
    found: dict[str, dict[int, float]] = {}
    for case in cases:
        for uid, by_row in case["advantages"].items():
            found.setdefault(uid, {}).update(by_row)
        assert measure_max_difference(case["parameters"], parameters) < 0.1 * SEVERAL_LR
    ordered = [found[uid][i] for uid in GROUPS for i in sorted(found[uid])]
    assert ordered == pytest.approx(list(advantages.values()), abs=1e-5)
    total = sum_metrics(case["sums"] for case in layout.select_shares(cases))
    assert total["loss_policy_sum"] == pytest.approx(loss, rel=1e-4, abs=1e-5)


@pytest.mark.ranks(TrainerCase("valued_updates", ONE))
@parametrize_layouts("valued_updates", on=SEVERAL_ON, quick=[ONE, TWO])
def test_a_critic_learns_the_same_on_any_number_of_ranks(results, folder, layout):
    (single,), cases = results[f"critic/{ONE.label}"], results[f"critic/{layout.label}"]
    for i, expected in enumerate(single["sums"]):
        total = sum_metrics(case["sums"][i] for case in layout.select_shares(cases))
        assert total["loss_value_sum"] == pytest.approx(expected["loss_value_sum"], 1e-4)
    assert single["sums"][1]["loss_value_sum"] < single["sums"][0]["loss_value_sum"]
    saved = load_value_model(str(folder / f"critic-{layout.label}"), dtype=torch.float32)
    assert measure_max_difference(dict(saved.named_parameters()), cases[0]["parameters"]) == 0
    for case in cases:
        difference = measure_max_difference(case["parameters"], single["parameters"])
        assert difference < 0.1 * SEVERAL_LR
        assert case["report"]["critic/lr"] == SEVERAL_LR
        assert case["report"]["critic/grad_norm"] > 0


@pytest.mark.ranks(TrainerCase("valued_updates", ONE))
@parametrize_layouts("valued_updates", on=SEVERAL_ON, quick=[ONE, TWO])
def test_a_two_headed_model_learns_both_losses_on_any_number_of_ranks(results, folder, layout):
    without, shared = (f"shared {coef}" for coef in SHARED_COEFS)
    policy_alone = results[f"policy/{ONE.label}"][0]["parameters"]
    expected = results[f"{shared}/{ONE.label}"][0]["parameters"]
    start = parameters_by_name(tiny_model(tied=True, seed=0, kv_heads=2))
    start |= {n: torch.zeros_like(t) for n, t in expected.items() if n not in start}
    cases = results[f"{shared}/{layout.label}"]
    for case in cases:
        assert measure_update_error(case["parameters"], expected, start) < 0.004
    # Without weight, the value loss leaves the policy and the head as they are.
    for case in results[f"{without}/{layout.label}"]:
        policy = {n: t for n, t in case["parameters"].items() if "score" not in n}
        assert measure_max_difference(policy, policy_alone) < 0.1 * SEVERAL_LR
        assert not case["parameters"]["score.weight"].any()
    assert sum(case["sums"][1]["critic_loss_value_sum"] for case in cases) > 0
    model, info = AutoModelForCausalLM.from_pretrained(
        folder / f"{shared}-{layout.label}", output_loading_info=True
    )
    assert not info["unexpected_keys"], "a generator loads the policy and nothing else"
    tokenizer = AutoTokenizer.from_pretrained(folder / f"{shared}-{layout.label}")
    assert tokenizer.eos_token == "t2"
    policy = {n: value for n, value in cases[0]["parameters"].items() if "score" not in n}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert measure_max_difference(parameters, policy) == 0


def test_texts_of_one_token_have_no_pretraining_loss(model_path):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    texts = PretrainingLoss(
        TextStream(TEXTS, seed=0),
        tokenizer,
        coef=PTX_COEF,
        num_texts=PTX_ROWS,
        max_tokens=1,
        micro_batch_tokens=8,
    )
    assert not list(texts.compute_losses(0, tiny_model(tied=True, seed=0), dp_rank=0, dp_size=2))


def plain_pretraining(model_path):
    """Compute `pretraining_updates` by hand: norms, losses and parameters."""
    model = tiny_model(tied=True, seed=0, kv_heads=2)
    optimizer = PlainOptimizer(model.parameters(), SEVERAL_LR)
    losses = []
    for update in range(len(PTX_DIVISORS)):
        rows = [text.split() for text in TextStream(TEXTS, seed=0).get_batch(update, PTX_ROWS)]
        tokens = [([int(word[1:]) for word in row] + [EOS])[:5] for row in rows]
        loss = torch.zeros(())
        for ids in map(torch.tensor, tokens):
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
            loss = loss - logprobs.gather(-1, ids[1:, None]).sum()
        loss = PTX_COEF * loss / sum(len(ids) - 1 for ids in tokens)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return optimizer.norms, losses, parameters_by_name(model)


@parametrize_layouts("pretraining_updates", on=SEVERAL_ON, quick=[ONE, TWO])
def test_pretraining_adds_its_mean_loss_for_any_loss_denominator(results, model_path, layout):
    norms, losses, parameters = plain_pretraining(model_path)
    for case in results[f"pretraining/{layout.label}"]:
        reports = case["reports"]
        assert [report["policy/grad_norm"] for report in reports] == pytest.approx(norms, rel=1e-4)
        assert [report["loss/ptx"] for report in reports] == pytest.approx(losses, rel=1e-4)
        assert measure_max_difference(case["parameters"], parameters) < 0.1 * SEVERAL_LR


@pytest.fixture(scope="module")
def expected():
    return plain_steps(2)


def measure_update_error(parameters, expected, start) -> float:
    """Return the largest error of a parameter's update, relative to the update, by the norm.

    AdamW scales every gradient to about the learning rate: where one is nearly 0, its rounding
    decides the direction of single elements, and each CPU rounds in its own way.
    """
    assert parameters.keys() == expected.keys() == start.keys()
    return max(
        ((parameters[name] - expected[name]).norm() / (expected[name] - start[name]).norm()).item()
        for name in expected
    )


@pytest.mark.parametrize("cuts", CUTS)
@parametrize_layouts("same_update", on=LAYOUTS, quick=QUICK)
def test_the_update_equals_a_plain_step_for_any_split_into_micro_batches(
    results, expected, layout, cuts
):
    norms, parameters = expected
    cases = results[f"update/{layout.label}/{cuts}"]
    assert len(cases) == layout.world_size
    for case in cases:
        assert case["norms"] == pytest.approx(norms, rel=1e-5)
        assert measure_max_difference(case["parameters"], parameters) < 1e-6


@parametrize_layouts("same_update", on=LAYOUTS, quick=QUICK)
def test_metric_sums_of_micro_batches_and_ranks_add_up_to_those_of_the_step(results, layout):
    metrics = []
    for cuts in CUTS:
        cases = [
            case["sums"] for case in layout.select_shares(results[f"update/{layout.label}/{cuts}"])
        ]
        total = {name: sum(case[name] for case in cases) for name in cases[0]}
        metrics.append(summarize_policy(total, compute_divisor(GROUPS)))
    assert metrics[0].keys() >= {"policy/kl_ref", "loss/kl", "policy/ess", "loss/policy"}
    assert all(math.isfinite(value) for value in metrics[0].values())
    for split_metrics in metrics[1:]:
        assert split_metrics == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)


@parametrize_layouts("save_and_resume", on=SAVED, quick=[TWO, SHARDED])
def test_resume_continues_as_if_uninterrupted(results, layout):
    for (report, parameters, num_steps), resumed in results[f"resume/{layout.label}"]:
        assert resumed[0] == report
        assert report["policy/lr"] == pytest.approx(LR * 2 / 4)  # the second of four warm-up steps
        assert measure_max_difference(resumed[1], parameters) == 0
        assert resumed[2] == num_steps == 2


@parametrize_layouts("save_and_resume", on=SAVED, quick=[TWO, SHARDED])
def test_the_whole_optimizer_state_is_offloaded(results, expected, layout):
    # The output head is tied to the embedding.
    unique_parameters = {n: p for n, p in expected[1].items() if n != "lm_head.weight"}
    num_bytes = 4 * sum(parameter.numel() for parameter in unique_parameters.values())
    # Moments, and with DeepSpeed master weights.
    is_deepspeed = layout.backend == "deepspeed"
    copies, is_sharded = 3 if is_deepspeed else 2, is_deepspeed or layout.zero_stage == 3
    share = copies * num_bytes // (layout.world_size // layout.tensor_parallel if is_sharded else 1)
    for offloaded in results[f"offloaded/{layout.label}"]:
        if layout.tensor_parallel > 1:  # persistent parameters stay unsplit
            assert share // layout.tensor_parallel < offloaded < share
        else:
            assert offloaded == share


@parametrize_layouts("save_and_resume", on=SAVED, quick=[TWO, SHARDED])
def test_resume_from_a_state_of_any_backend_stage_and_number_of_ranks(results, layout):
    """Loading loses no bit, and the next step equals that of any other layout."""
    (expected, parameters, _), _ = results[f"resume/{layout.label}"][0]
    norm = pytest.approx(expected["policy/grad_norm"], rel=1e-4)
    for moved in results[f"moved/{layout.label}"]:
        for label, (saved, loaded, (report, moved_parameters, num_updates)) in moved.items():
            assert measure_max_difference(loaded, saved) == 0, label
            assert report["policy/grad_norm"] == norm, label
            assert measure_max_difference(moved_parameters, parameters) < 1e-6, label
            assert num_updates == 2


@pytest.mark.slow
@pytest.mark.ranks(TrainerCase("master_weights", ONE_OF_DEEPSPEED))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resume_restores_the_master_weights_of_any_stage(results, expected, stage):
    ((start, (report, parameters, _), runs),) = results[f"bf16_state/{stage}"]
    assert start["policy/grad_norm"] == pytest.approx(expected[0][0], rel=0.05), "as in float32"
    assert runs.pop(stage)[0] == report
    for source_stage, (metrics, trained, num_updates) in runs.items():
        # A CPU's kernels decide in which order bfloat16 rounds; stages differ by a bit of it.
        assert metrics["policy/grad_norm"] == pytest.approx(report["policy/grad_norm"], rel=5e-3)
        assert measure_max_difference(trained, parameters) < 5e-3, source_stage
        assert num_updates == 2


@parametrize_layouts("muon_updates", on=[ONE, TWO])
def test_muon_makes_orthogonal_updates_of_matrices_and_resumes(results, layout):
    for start, first, second, loaded, again in results[f"muon/{layout.label}"]:
        matrices = [name for name in start if name.endswith("proj.weight")]
        for name in matrices:
            # As large as AdamW's: a fifth of the rate, times the root of the longer side.
            scale = 0.2 * LR * max(start[name].shape) ** 0.5
            sizes = torch.linalg.svdvals((start[name] - first[name]).double()) / scale
            assert 0.6 < sizes[0] < 1.3 and sizes[1] > 0.5 * sizes[0], name
        moved = (start["model.embed_tokens.weight"] - first["model.embed_tokens.weight"]).abs()
        assert moved.max().item() == pytest.approx(LR, rel=0.01), "AdamW's first update"
        assert len(matrices) >= 7
        assert measure_max_difference(loaded, first) == 0
        assert measure_max_difference(again, second) == 0
        assert measure_max_difference(second, first) > 0


@parametrize_layouts("skipped_updates", on=PAIRS, quick=[TWO, SHARDED])
def test_steps_without_tokens_or_with_a_non_finite_gradient_skip_the_update(results, layout):
    """The learning rate follows the steps: two of two updates each, in a warm-up of four."""
    for case in results[f"skipped/{layout.label}"]:
        assert {report["policy/grad_norm"] for report in case["reports"]} == {0}
        rates = [report["policy/lr"] for report in case["reports"]]
        assert rates == pytest.approx([LR / 4, LR / 4, LR / 2, LR / 2])
        assert "update 0: the gradient's norm is" in case["message"]
        assert case["unchanged"]


@parametrize_layouts("save_late", on=[Layout("torch", 3, 2)])
def test_a_rank_may_save_for_longer_than_a_collective_may_take(results, layout):
    assert results[f"late/{layout.label}"] == [True, True]


@parametrize_layouts("recomputed_updates", on=PAIRS)
def test_recomputing_activations_does_not_change_the_update(results, expected, layout):
    for case in results[f"recomputed/{layout.label}"]:
        assert case["norms"] == pytest.approx(expected[0], rel=1e-5)
        assert measure_max_difference(case["parameters"], expected[1]) < 1e-6


@parametrize_layouts("overlapped_updates", on=[SHARDED, GATHERED], quick=[SHARDED])
def test_overlapping_reductions_do_not_change_the_update(results, expected, layout):
    for case in results[f"overlapped/{layout.label}"]:
        assert case["norms"] == pytest.approx(expected[0], rel=1e-5)
        assert measure_max_difference(case["parameters"], expected[1]) < 1e-6


@pytest.mark.slow
@pytest.mark.ranks(OTHER_SETTINGS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_in_host_memory_makes_the_same_updates(results, expected, stage):
    ((first, resumed),) = results[f"offloaded/{stage}"]
    assert measure_max_difference(first, expected[1]) < 1e-6
    assert measure_max_difference(resumed, first) == 0


@pytest.mark.slow
@pytest.mark.ranks(OTHER_SETTINGS)
def test_bfloat16_gradients_are_summed_in_float32_on_the_way_to_host_memory(results):
    (on_device,), (on_host,) = (results[f"bfloat16 state/{offload}"] for offload in (False, True))
    compared = [pair for pair in zip(on_device, on_host, strict=True) if pair[0].dim()]
    assert compared
    for expected, moments in compared:
        # Rounded to bfloat16, the sums would differ by a thousandth.
        assert (moments - expected).norm() < 3e-4 * expected.norm()


STEPS = 10


@pytest.mark.parametrize(
    ("settings", "name", "options"),
    [
        ({"lr_schedule": "linear"}, "linear", {}),
        ({"lr_schedule": "linear", "lr_min": 2.0}, "polynomial", {"lr_end": 2.0}),
        ({"lr_schedule": "cosine"}, "cosine", {}),
        ({"lr_schedule": "cosine", "lr_min": 2.0}, "cosine_with_min_lr", {"min_lr": 2.0}),
        (
            {"lr_schedule": "cosine", "lr_min": 2.0, "lr_decay_steps": 3},
            "warmup_stable_decay",
            {"min_lr_ratio": 0.25, "num_decay_steps": 3},
        ),
    ],
)
def test_falling_schedules_equal_those_of_transformers(settings, name, options):
    schedule = get_scheduler(name, torch.optim.SGD([torch.zeros(1)], lr=8.0), 0, STEPS, options)
    expected = [8.0 * schedule.lr_lambdas[0](step) for step in range(STEPS + 1)]
    config = TrainerConfig(lr=8.0, **settings)
    rates = [config.compute_lr(step, STEPS) for step in range(STEPS + 1)]
    assert rates == pytest.approx(expected)
    assert rates[0] == 8.0 and rates[-1] == pytest.approx(config.lr_min or 0.0)
    warm = [replace(config, warmup_steps=2).compute_lr(step, STEPS) for step in (0, 1, STEPS)]
    assert warm == pytest.approx([4.0, 8.0, rates[-1]])


SPLIT_RANKS = {"tensor_parallel": 2, "backend": "torch"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_min": 1e-7}, "lr_min=1e-07: lr_schedule=constant does not fall"),
        ({"lr_min": 1.0, "lr_schedule": "cosine"}, "lr_min=1.0: must be below lr=1e-06"),
        ({"tensor_parallel": 2, "world_size": 2}, "tensor_parallel=2: needs backend=torch"),
        ({**SPLIT_RANKS, "world_size": 3}, "tensor_parallel=2: must divide trainer.world_size=3"),
        (
            {**SPLIT_RANKS, "world_size": 2, "lora_rank": 4},
            "tensor_parallel=2: does not support LoRA; lora_rank must be 0",
        ),
        ({"betas": [0.9]}, "betas=[0.9]: must be two numbers from 0 to below 1"),
        ({"dtype": "bfloat16", "zero_stage": 0}, "dtype=bfloat16: needs master weights, which"),
    ],
)
def test_an_invalid_trainer_config_is_rejected(settings, message):
    with pytest.raises(ConfigError, match=re.escape(f"trainer.{message}")):
        TrainerConfig(**settings)
