"""What constants of published runs are fitted on: parts of synchronous steps, by least squares."""

from dataclasses import replace

import pytest

from benchmarks.published import nemo, nemo_fit, verl, verl_fit
from benchmarks.published.batches import calls_s, one_ahead_s
from benchmarks.published.points import VERL, VerlRun
from streamrl.placement.costs import CostConstants


def run_of(name: str, train: int, generate: int = 0) -> VerlRun:
    (found,) = [
        run for run in VERL if (run.name, run.train, run.generate) == (name, train, generate)
    ]
    return found


def squares(calibrated: verl.Calibration) -> float:
    return sum(error**2 for error in verl_fit.errors(calibrated))


def nemo_squares(constants: CostConstants) -> float:
    return sum(error**2 for error in nemo_fit.errors(constants))


def test_what_no_part_names_is_what_is_left_of_a_step() -> None:
    assert run_of("7b-20k", 16).rest_s == pytest.approx(749 - 321 - 88 - 286)
    # Of the mean of two steps, and not of the one that nothing is fitted on.
    assert verl.rest_s("7b-28k") == pytest.approx((10.89 + 10.72) / 2)


def test_a_batch_is_handed_over_padded_whatever_devices_there_are() -> None:
    # 512 prompts of 12 responses, each of 2,048 and 20,480 tokens, of a microsecond.
    slow = replace(verl.CALIBRATED, handed_token_s=1e-6)
    for run in (run_of("7b-20k", 16), run_of("7b-20k", 12, 4)):
        assert verl.handed_s(run, slow) == pytest.approx(512 * 12 * 22528 * 1e-6)


@pytest.mark.parametrize("part", ["own", "update"])
def test_who_scores_or_trains_waits_for_the_batch_once(part: str) -> None:
    run = run_of("7b-28k", 64)
    at_once = replace(verl.CALIBRATED, handed_token_s=0.0)
    more_s = verl_fit.parts(run, verl.CALIBRATED)[part][1] - verl_fit.parts(run, at_once)[part][1]
    assert more_s == pytest.approx(verl.handed_s(run), rel=0.01)


def test_only_megatron_computes_entropy_apart() -> None:
    twice = replace(verl.CALIBRATED, entropy=2 * verl.CALIBRATED.entropy)

    def own_s(run: VerlRun, calibrated: verl.Calibration) -> float:
        return verl_fit.parts(run, calibrated)["own"][1] - verl.handed_s(run, calibrated)

    fsdp2, megatron = run_of("7b-20k", 16), run_of("7b-8k", 16)
    assert own_s(fsdp2, twice) == own_s(fsdp2, verl.CALIBRATED)
    assert own_s(megatron, twice) == pytest.approx(2 * own_s(megatron, verl.CALIBRATED), rel=0.01)


def test_the_slowest_replica_takes_longer_than_the_mean_of_them() -> None:
    for name in ("7b-20k", "7b-8k"):
        parts = verl_fit.parts(run_of(name, 16), verl.CALIBRATED)
        printed, predicted = (parts["gen"][side] - parts["sampled"][side] for side in (0, 1))
        assert predicted == pytest.approx(printed, rel=0.2)


def test_one_step_off_takes_the_longer_of_sampling_and_of_the_rest() -> None:
    run = run_of("7b-20k", 12, 4)
    asked = verl.problem(run)
    model, placed = verl.Costs(run, asked), verl.placement(run, asked)
    apart = calls_s(asked, model, placed)
    assert set(apart) == {"generate", "reward", "train"}
    weights = model.predict_timings(placed).weights["generate"]
    longer = max(apart["generate"], apart["reward"] + apart["train"])
    step_s = weights.publish_s + weights.pull_s + longer
    assert one_ahead_s(asked, model, placed) == pytest.approx(step_s)


@pytest.mark.parametrize(
    "name", ["fsdp2", "megatron", "entropy", "handed_token_s", "update_s", "decode_layer_s"]
)
def test_no_constant_of_verl_is_better_by_a_tenth_more_or_less(name: str) -> None:
    best = squares(verl.CALIBRATED)
    for times in (0.9, 1.1):
        other = replace(verl.CALIBRATED, **{name: times * vars(verl.CALIBRATED)[name]})
        assert squares(other) > best


@pytest.mark.parametrize("name", nemo_fit.NAMES)
def test_no_constant_of_nemo_is_better_by_a_tenth_more_or_less(name: str) -> None:
    best = nemo_squares(nemo.CONSTANTS)
    for times in (0.9, 1.1):
        other = replace(nemo.CONSTANTS, **{name: times * vars(nemo.CONSTANTS)[name]})
        assert nemo_squares(other) > best


def test_a_calibration_comes_back_from_its_logarithms() -> None:
    back = verl_fit.of_logarithms(verl_fit.to_logarithms(verl.CALIBRATED))
    assert back.fsdp2 == pytest.approx(verl.CALIBRATED.fsdp2)
    assert back.medians == pytest.approx(verl.CALIBRATED.medians)
