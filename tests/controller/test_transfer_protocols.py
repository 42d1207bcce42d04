"""Transfer protocols: every row goes to its rank and returns once; padding never returns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.controller.batches import (
    BatchRef,
    RowSlice,
    concat_columns,
    count_rows,
    join_batches,
    slice_columns,
)
from streamrl.controller.collect import RankAnswers, make_rank_inputs
from streamrl.controller.transfer_protocols import (
    PROTOCOLS,
    DistributeFn,
    RankCalls,
    TransferProtocol,
    WorkerMesh,
    add_protocol,
    collect_from_replicas,
    split_by_replica,
)
from streamrl.resharding.grids import RankGrid
from streamrl.resharding.grouping import GenerationSizes, assign_zero_redundancy


def batch(rows: int, name: str = "x") -> BatchRef:
    return BatchRef.from_slices(RowSlice(name, 0, rows))


def parts_of(ref: BatchRef) -> tuple[RowSlice, ...]:
    (strip,) = ref.blocks
    return strip.slices


def rows_of(ref: BatchRef) -> list[int]:
    return [row for part in parts_of(ref) for row in range(part.start, part.stop)]


def calls_of(rank_calls: RankCalls) -> list[tuple[Any, ...]]:
    """Return all calls; fails if a rank is not called."""
    assert None not in rank_calls.calls
    return [call for call in rank_calls.calls if call is not None]


def through(name: str, mesh: WorkerMesh, rows: BatchRef) -> tuple[list, BatchRef]:
    """Return each rank's rows, and the result if each rank answers with its input."""
    rank_calls = PROTOCOLS[name].distribute_calls(mesh, (rows,))
    answers = [call and call[0] for call in rank_calls.calls]
    return answers, collected(name, mesh, rank_calls, answers)


def collected(
    name: str, mesh: WorkerMesh, rank_calls: RankCalls, answers: Sequence[Any], **options: bool
) -> Any:
    """Collect answers to distributed calls."""
    protocol = PROTOCOLS[name]
    rank_inputs = make_rank_inputs(
        rank_calls, protocol, "W.do", **{"knows_padding": False, **options}
    )
    names = [f"W-{rank}.do" for rank in range(mesh.size)]
    return protocol.collect(
        mesh, RankAnswers(answers, rank_inputs, protocol.answer_kind, names, **options)
    )


def make_answers(*counts: int) -> list[BatchRef]:
    """Return an answer with `counts[i]` rows from rank i."""
    return [BatchRef.from_slices(RowSlice(rank, 0, count)) for rank, count in enumerate(counts)]


MESHES = st.builds(
    lambda stages, tensor, replicas, order: WorkerMesh(
        RankGrid(stages, tensor, replicas, order).assign_ranks()
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["hf", "mcore"]),
)


@given(st.sampled_from(["DP", "P3D"]), MESHES, st.integers(0, 30))
def test_distributed_rows_return_once_and_in_order(name: str, mesh: WorkerMesh, rows: int) -> None:
    _, back = through(name, mesh, batch(rows))
    assert rows_of(back) == list(range(rows))


@given(st.integers(1, 30), st.sampled_from([("2-4-2", "1-2-4-2"), ("1-4-2", "1-2-2-2")]))
def test_generation_gets_a_share_per_generating_replica(rows: int, sizes) -> None:
    train, generate = RankGrid.from_text(sizes[0]), GenerationSizes.from_text(sizes[1])
    serving = assign_zero_redundancy(train, generate)
    answers, back = through(
        "P3D_ALL_MICRO_DP", WorkerMesh(train.assign_ranks(), serving), batch(rows)
    )
    assert rows_of(back) == list(range(rows))
    for group in serving.group_ranks("dp_rank"):
        assert len({answers[rank] for rank in group}) == 1, "all ranks of a replica get the same"
    shares = {answers[group[0]] for group in serving.group_ranks("dp_rank")}
    assert sum(len(share) for share in shares) >= rows


def test_the_3d_call_of_hybridflow_figure_5() -> None:
    # An actor of layout 1-2-3, then a critic of 2-1-2; a batch of six rows.
    actor = WorkerMesh(RankGrid.from_text("1-2-3").assign_ranks())
    critic = WorkerMesh(RankGrid.from_text("2-1-2").assign_ranks())
    protocol = PROTOCOLS["P3D"]
    rank_calls = protocol.distribute(actor, (batch(6),))
    assert [rows_of(call[0]) for call in calls_of(rank_calls)] == [
        [0, 1],
        [0, 1],
        [2, 3],
        [2, 3],
        [4, 5],
        [4, 5],
    ]
    answers = [BatchRef.from_slices(RowSlice(f"rank {rank}", 0, 2)) for rank in range(6)]
    collected = protocol.collect(actor, answers)
    assert [part.reference for part in parts_of(collected)] == ["rank 0", "rank 2", "rank 4"]
    second = protocol.distribute(critic, (collected,))
    # The first actor replica and half of the second, as whole references or slices.
    first = (RowSlice("rank 0", 0, 2), RowSlice("rank 2", 0, 1))
    assert [parts_of(call[0]) for call in calls_of(second)] == [
        first,
        first,
        (RowSlice("rank 2", 1, 2), RowSlice("rank 4", 0, 2)),
        (RowSlice("rank 2", 1, 2), RowSlice("rank 4", 0, 2)),
    ]


def test_the_first_tensor_rank_of_the_last_stage_answers_for_a_replica() -> None:
    mesh = WorkerMesh(RankGrid.from_text("2-2-2").assign_ranks())
    answers = [f"rank {rank}" for rank in range(8)]
    assert PROTOCOLS["P3D"].collect(mesh, answers) == ["rank 2", "rank 6"]
    assert PROTOCOLS["P3D_PP_ONLY"].collect(mesh, answers) == ["rank 0", "rank 2"]


def test_one_to_all_all_to_all_and_rank_zero() -> None:
    mesh = WorkerMesh(RankGrid.from_text("1-2-2").assign_ranks())
    assert PROTOCOLS["ONE_TO_ALL"].distribute(mesh, (7,)).calls == ((7,),) * 4
    assert PROTOCOLS["ALL_TO_ALL"].distribute(mesh, ([1, 2, 3, 4],)).calls == (
        (1,),
        (2,),
        (3,),
        (4,),
    )
    assert PROTOCOLS["RANK_ZERO"].distribute(mesh, (7,)).calls == ((7,), None, None, None)
    assert PROTOCOLS["RANK_ZERO"].collect(mesh, ["a", None, None, None]) == "a"
    for value, message in (
        ([1, 2, 3], "3 values for 4 ranks"),
        (5, "a int: must be a list with a value for each rank"),
        (batch(4), "a BatchRef: must be a list"),
    ):
        with pytest.raises(ValueError, match=message):
            PROTOCOLS["ALL_TO_ALL"].distribute(mesh, (value,))


def test_metrics_come_from_every_rank() -> None:
    mesh = WorkerMesh(RankGrid.from_text("1-1-3").assign_ranks())
    rank_calls = PROTOCOLS["DP_METRIC"].distribute(mesh, (batch(4), "setting"))
    assert [(len(share), setting) for share, setting in calls_of(rank_calls)] == [
        (2, "setting")
    ] * 3
    assert PROTOCOLS["DP_METRIC"].collect(mesh, [0.1, 0.2, 0.3]) == [0.1, 0.2, 0.3]


def test_a_row_may_become_several_and_padding_is_cut_accordingly() -> None:
    mesh = WorkerMesh(RankGrid.from_text("1-1-4").assign_ranks())
    rank_calls = PROTOCOLS["DP"].distribute_calls(mesh, (batch(6),))
    assert [call[0].num_padding for call in rank_calls.calls if call] == [0, 0, 0, 2]
    # Two rollouts per prompt.
    assert len(collected("DP", mesh, rank_calls, make_answers(4, 4, 4, 4))) == 12


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((4, 0), r"W-1\.do: 0 rows returned for 2: must be a multiple"),
        ((1, 3), r"W-0\.do: 1 rows returned for 2"),
        ((2, 4), r"W-1\.do: 2 rows returned per input row, but 1 by another rank"),
    ],
)
@pytest.mark.parametrize("rows", [3, 4])
def test_wrong_row_counts_per_rank_are_refused(
    rows: int, counts: tuple[int, int], message: str
) -> None:
    """The totals fit: as many rows as distributed, or twice as many."""
    mesh = WorkerMesh(RankGrid.from_text("1-1-2").assign_ranks())
    rank_calls = PROTOCOLS["DP"].distribute_calls(mesh, (batch(rows),))
    with pytest.raises(ValueError, match=message):
        collected("DP", mesh, rank_calls, make_answers(*counts))


def test_padding_is_cut_on_the_rank_that_got_it(monkeypatch) -> None:
    monkeypatch.setattr(
        "streamrl.controller.transfer_protocols.PROTOCOLS", protocols := dict(PROTOCOLS)
    )

    def backwards(mesh: WorkerMesh, arguments: tuple[Any, ...]) -> RankCalls:
        pieces = arguments[0].pad_to_multiple(mesh.size).split(mesh.size)
        return RankCalls(tuple((piece,) for piece in reversed(pieces)))

    protocol = add_protocol("TURNED_ROUND", backwards, PROTOCOLS["DP"].collect)
    assert protocols["TURNED_ROUND"] is protocol
    mesh = WorkerMesh(RankGrid.from_text("1-1-2").assign_ranks())
    rank_calls = protocol.distribute_calls(mesh, (batch(3),))
    answers = [call and call[0] for call in rank_calls.calls]
    rank_inputs = make_rank_inputs(rank_calls, protocol, "W.do", knows_padding=False)
    assert [each.num_real for each in rank_inputs] == [1, 2]
    back = protocol.collect(
        mesh, RankAnswers(answers, rank_inputs, protocol.answer_kind, ["a", "b"])
    )
    assert rows_of(back) == [2, 0, 1]


def test_metrics_over_padding_are_refused_unless_the_method_takes_real() -> None:
    mesh = WorkerMesh(RankGrid.from_text("1-1-2").assign_ranks())
    rank_calls = PROTOCOLS["DP_METRIC"].distribute_calls(mesh, (batch(3),))
    message = r"W\.do: 1 of 4 rows are padding, which would count in the metrics of 2 ranks: pass"
    with pytest.raises(ValueError, match=message):
        make_rank_inputs(rank_calls, PROTOCOLS["DP_METRIC"], "W.do", knows_padding=False)
    assert collected("DP_METRIC", mesh, rank_calls, [0.5, 2.0], knows_padding=True) == [0.5, 2.0]
    rank_calls = PROTOCOLS["DP"].distribute_calls(mesh, (batch(3),))
    for nothing_of_rows in (0.5, None):
        with pytest.raises(ValueError, match=r"W-1\.do: 1 of its 2 rows are padding, which would"):
            collected("DP", mesh, rank_calls, [nothing_of_rows] * 2)
    # A method that takes `real` may return any number of rows.
    assert len(collected("DP", mesh, rank_calls, make_answers(1, 0), knows_padding=True)) == 1


def test_answers_of_uncollected_ranks_are_not_checked() -> None:
    """Stages before the last return no rows."""
    mesh = WorkerMesh(RankGrid.from_text("2-1-2").assign_ranks())
    rank_calls = PROTOCOLS["P3D"].distribute_calls(mesh, (batch(3),))
    first, last = make_answers(2, 2)
    assert len(collected("P3D", mesh, rank_calls, [None, first, None, last])) == 3


def test_distribute_must_return_a_call_per_rank() -> None:
    mesh = WorkerMesh(RankGrid.from_text("1-1-2").assign_ranks())
    wrong: list[tuple[Any, str]] = [
        (RankCalls(((1,),) * 5), "protocol OWN: distribute returned 5 calls for 2 ranks"),
        (RankCalls(((1,),)), "returned 1 calls for 2 ranks"),
        ([(1,), (1,)], "protocol OWN: distribute returned a list, must be RankCalls"),
    ]

    def giving(rank_calls: Any) -> DistributeFn:
        return lambda mesh, arguments: rank_calls

    for rank_calls, message in wrong:
        protocol = TransferProtocol("OWN", giving(rank_calls), PROTOCOLS["DP"].collect)
        with pytest.raises(ValueError, match=message):
            protocol.distribute_calls(mesh, ())


def test_a_plain_dict_of_columns_is_refused() -> None:
    mesh = WorkerMesh(RankGrid.from_text("1-1-2").assign_ranks())
    for name in ("DP", "P3D", "DP_METRIC"):
        with pytest.raises(ValueError, match=r"a dict of columns .*: pass put"):
            PROTOCOLS[name].distribute_calls(mesh, ({"x": np.arange(3)},))
    for settings in ({"lr": 0.5}, {}):
        assert PROTOCOLS["DP"].distribute_calls(mesh, (settings,)).calls == ((settings,),) * 2


def test_batches_of_a_call_must_have_equal_lengths() -> None:
    mesh = WorkerMesh(RankGrid.from_text("1-1-2").assign_ranks())
    with pytest.raises(ValueError, match=r"batches of different lengths in a call: \[2, 4\] rows"):
        PROTOCOLS["DP"].distribute(mesh, (batch(2), batch(4)))
    with pytest.raises(ValueError, match="no layout for generation"):
        PROTOCOLS["P3D_ALL_MICRO_DP"].distribute(mesh, (batch(2),))


def test_a_user_can_register_a_protocol(monkeypatch) -> None:
    monkeypatch.setattr("streamrl.controller.transfer_protocols.PROTOCOLS", dict(PROTOCOLS))

    def seating(mesh: WorkerMesh):
        return mesh.train

    protocol = add_protocol(
        "FIRST_HALF", split_by_replica(seating), lambda mesh, answers: answers[0]
    )
    mesh = WorkerMesh(RankGrid.from_text("1-1-2").assign_ranks())
    assert protocol.collect(mesh, ["a", "b"]) == "a"
    with pytest.raises(ValueError, match="protocol P3D exists already"):
        add_protocol("P3D", split_by_replica(seating), collect_from_replicas(seating))


@given(st.lists(st.integers(0, 5), max_size=5), st.data())
def test_slicing_a_block_equals_slicing_its_concatenation(
    lengths: list[int], data: st.DataObject
) -> None:
    ref = BatchRef.from_slices(*(RowSlice(i, 0, length) for i, length in enumerate(lengths)))
    every = [(part.reference, row) for part in parts_of(ref) for row in range(len(part))]
    start = data.draw(st.integers(0, len(ref)))
    stop = data.draw(st.integers(start, len(ref)))
    found = ref.slice_rows(start, stop)
    assert [
        (part.reference, row) for part in parts_of(found) for row in range(part.start, part.stop)
    ] == every[start:stop]
    again = join_batches([ref.slice_rows(0, start), ref.slice_rows(start, len(ref))]).slice_rows(
        start, stop
    )
    assert again == found or len(again) == len(found) == 0


def test_an_empty_slice_keeps_its_columns() -> None:
    mesh = WorkerMesh(RankGrid.from_text("1-1-2").assign_ranks())
    answers, back = through("DP", mesh, batch(0))
    assert [parts_of(answer) for answer in answers] == [(RowSlice("x", 0, 0),)] * 2
    assert parts_of(back) == (RowSlice("x", 0, 0),)
    # Joined with rows, an empty slice needs no fetch.
    assert parts_of(join_batches([batch(0, "y"), batch(2)])) == (RowSlice("x", 0, 2),)


def test_joined_columns_are_sliced_together() -> None:
    both = batch(4, "ids") | BatchRef.from_slices(RowSlice("scores", 3, 5), RowSlice("more", 0, 2))
    half = both.slice_rows(1, 3)
    assert [strip.slices for strip in half.blocks] == [
        (RowSlice("ids", 1, 3),),
        (RowSlice("scores", 4, 5), RowSlice("more", 0, 1)),
    ]
    with pytest.raises(ValueError, match=r"columns of \[3, 4\] rows side by side"):
        batch(4) | batch(3)


@given(st.integers(1, 7), st.integers(1, 20))
def test_padding_repeats_from_the_beginning(rows: int, multiple: int) -> None:
    full = rows_of(batch(rows).pad_to_multiple(multiple))
    assert len(full) % multiple == 0 and len(full) - rows < multiple
    assert full == [i % rows for i in range(len(full))]


def test_columns_of_any_type_are_sliced_and_concatenated() -> None:
    import torch

    whole = {"ids": np.arange(6), "logprobs": torch.arange(6.0), "text": list("abcdef")}
    pieces = [slice_columns(whole, 0, 2), slice_columns(whole, 2, 6)]
    again = concat_columns(pieces)
    assert again["ids"].tolist() == list(range(6)) and again["text"] == list("abcdef")
    assert again["logprobs"].equal(whole["logprobs"])
    with pytest.raises(ValueError, match=r"different lengths \(a: 1, b: 2\)"):
        count_rows({"a": [1], "b": [1, 2]})
    with pytest.raises(ValueError, match="different columns"):
        concat_columns([{"a": [1]}, {"b": [1]}])
