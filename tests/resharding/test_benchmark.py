"""The benchmark plans every requested pair of layouts and executes one."""

import itertools
import json
import math
import subprocess
import sys

import pytest

from benchmarks import resharding
from benchmarks.table_2 import redundant_fraction
from streamrl.resharding.grids import RankGrid
from streamrl.resharding.grouping import GenerationSizes
from streamrl.resharding.layouts import create_layout


def make_arguments(train: str, generate: str, **settings: object) -> list[str]:
    options = {"train": train, "generate": generate, **settings}
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def list_dividing_pairs() -> list[tuple[str, str]]:
    """Return all pairs of sizes that divide, for up to 16 ranks."""
    results = []
    for stages, tensor, replicas in itertools.product((1, 2, 3, 4, 5, 6, 8), (1, 2, 4), (1, 2)):
        if stages * tensor * replicas > resharding.MOST_RANKS:
            continue
        for fewer, narrower in itertools.product(range(1, stages + 1), (1, 2, 4)):
            if stages % fewer == 0 and tensor % narrower == 0:
                micro = stages * tensor // fewer // narrower
                pair = (f"{stages}-{tensor}-{replicas}", f"{fewer}-{narrower}-{micro}-{replicas}")
                results.append(pair)
    return results


@pytest.mark.parametrize("order", ["hf", "mcore"])
def test_zero_redundancy_is_planned_for_all_sizes_that_divide_evenly(order: str):
    pairs = list_dividing_pairs()
    assert len(pairs) == 121
    for train, generate in pairs:
        arguments = make_arguments(train, generate, order=order, model="transformer")
        switch = resharding.make_switch(resharding.make_parser().parse_args(arguments))
        plans = switch.plans()
        for way in ("point_to_point", "in_groups"):
            report = plans[way].report_bytes()
            assert not any(redundant_fraction(report, rank) for rank in report.rank_bytes), (
                train,
                generate,
                way,
            )


def test_a_transformer_is_planned_for_any_two_sizes(monkeypatch: pytest.MonkeyPatch):
    # Only plan: executing would start too many processes.
    monkeypatch.setattr(resharding, "MOST_RANKS", 35)
    for trained, served in itertools.product((1, 2, 3, 4, 5, 7), repeat=2):
        ranks = math.lcm(trained, served)
        pair = (f"1-{trained}-{ranks // trained}", f"1-{served}-1-{ranks // served}")
        arguments = make_arguments(*pair, grouping="overlap", model="transformer")
        switch = resharding.make_switch(resharding.make_parser().parse_args(arguments))
        report = switch.plans()["point_to_point"].report_bytes()
        target = create_layout(switch.model, switch.serving)
        for rank, counts in report.rank_bytes.items():
            assert sum(counts.received_by_link.values()) == target.count_bytes(rank), pair


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.resharding", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    ("train", "generate", "groups"),
    [
        ("4-1-1", "2-1-2-1", [[0, 1], [2, 3]]),
        pytest.param("1-3-1", "1-1-3-1", [[0, 1, 2]], marks=pytest.mark.slow),
    ],
)
def test_unequal_stages_and_odd_sizes_are_executed(
    train: str, generate: str, groups: list[list[int]]
):
    arguments = make_arguments(train, generate, model="transformer", rounds=1, bucket_mb=0.01)
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout)
    assert results["groups"]["micro_data"] == groups
    assert set(results["ways"]) == {"in_groups", "point_to_point", "full_gather"}
    ranks = sum(map(len, groups))
    for way, figures in results["ways"].items():
        assert figures["bit_exact"], way
        assert figures["received_of_M"] == figures["planned_of_M"], way
        assert figures["peak_of_M"] == figures["planned_peak_of_M"], way
        if way != "full_gather":
            assert figures["redundant_of_M"] == ["0"] * ranks


def test_every_process_has_memory_for_the_model():
    for tensor, part in itertools.product(range(1, 17), repeat=2):
        for replicas in range(1, 16 // tensor + 1):
            sizes = GenerationSizes(1, part, 1, 1)
            model = resharding.make_even_model(
                RankGrid.from_text(f"1-{tensor}-{replicas}", "hf"), sizes
            )
            assert sum(spec.num_bytes for spec in model.tensors) <= resharding.MOST_BYTES


@pytest.mark.slow
def test_generation_shards_are_views_of_larger_training_shards():
    arguments = make_arguments("1-1-4", "1-2-1-2", grouping="overlap", rounds=1, bucket_mb=100)
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    ways = json.loads(done.stdout)["ways"]
    copies, full = ways["point_to_point"], ways["full_gather"]
    assert copies["received_of_M"] == copies["copied_of_M"] == ["0"] * 4
    assert copies["peak_of_M"] == copies["planned_peak_of_M"] == ["1"] * 4
    # A quarter trained, a half served, one received, and the quarter that is sent.
    assert full["peak_of_M"] == full["planned_peak_of_M"] == ["2"] * 4
    assert full["peak_in_one_piece_of_M"] == ["1"] * 4


@pytest.mark.slow
def test_no_transfer_has_no_baseline_to_compare_with():
    done = run(*make_arguments("1-1-2", "1-1-1-2", rounds=1), "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    ways = json.loads(done.stdout)["ways"]
    assert ways["point_to_point"]["received_of_M"] == ["0", "0"]
    assert ways["point_to_point"]["over_all_gather"] is None
    assert ways["point_to_point"]["all_gather_seconds"] is None
    assert ways["full_gather"]["received_of_M"] == ["1/2", "1/2"]
    assert ways["full_gather"]["over_all_gather"] > 0


BAD = [
    ({"bucket_mb": "nan"}, "--bucket-mb=nan: must be at least 32 bytes"),
    ({"bucket_mb": "inf"}, "--bucket-mb=inf: must be at least 32 bytes"),
    ({"bucket_mb": "-1"}, "--bucket-mb=-1: must be at least 32 bytes"),
    ({"bucket_mb": "0.000001"}, "--bucket-mb=1e-06: must be at least 32 bytes"),
    ({"bucket_mb": "much"}, "argument --bucket-mb: invalid float value: 'much'"),
    ({"rounds": "0"}, "argument --rounds: 0: must be a whole number, 1 or more"),
    ({"ranks_per_node": "0"}, "argument --ranks-per-node: 0: must be a whole number, 1 or more"),
    ({"train": "1-4"}, "1-4: must be pipeline-tensor-data, as in 1-4-2"),
    ({"train": "1-17-1"}, "17 ranks: at most 16 processes are started"),
    ({"generate": "1-1-17-1"}, "17 ranks: at most 16 processes are started"),
    ({"generate": "1-2-1-2"}, "training 1-4-2 has 8 ranks, generation 1-2-1-2 has 4"),
    ({"generate": "1-8-1-1"}, "grouping zero: 1-8-1-1 must divide 1-4-2"),
    ({"order": "new"}, "argument --order: invalid choice: 'new'"),
]


@pytest.mark.parametrize(("options", "line"), BAD, ids=[f"{bad}" for bad, _ in BAD])
def test_an_invalid_argument_gives_a_one_line_error(
    options: dict[str, str], line: str, capsys: pytest.CaptureFixture[str]
):
    arguments = {"train": "1-4-2", "generate": "1-2-2-2", **options}
    with pytest.raises(SystemExit) as ended:
        resharding.main(make_arguments(**arguments))
    output = capsys.readouterr()
    assert ended.value.code == 2
    assert output.err.startswith(f"resharding: {line}") and output.err.count("\n") == 1
    assert not output.out
