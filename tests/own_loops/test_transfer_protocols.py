"""Transfer protocols: every row goes to its rank and returns once."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.own_loops.batches import BatchRef, RowSlice, count_rows, join_batches
from streamrl.own_loops.transfer_protocols import PROTOCOLS, WorkerMesh
from streamrl.resharding.grids import RankGrid
from streamrl.resharding.grouping import GenerationSizes, assign_zero_redundancy


def make_mesh(grid: str) -> WorkerMesh:
    return WorkerMesh(RankGrid.from_text(grid).assign_ranks())


def make_batch(rows: int, reference: str = "x") -> BatchRef:
    """Return a batch of a column, named as its stored batch."""
    return BatchRef.from_stored(reference, [reference], rows)


def parts_of(ref: BatchRef) -> tuple[RowSlice, ...]:
    (column,) = ref.columns.values()
    return column


def rows_of(ref: BatchRef) -> list[int]:
    return [row for part in parts_of(ref) for row in range(part.start, part.stop)]


def call_through(name: str, mesh: WorkerMesh, rows: BatchRef) -> tuple[list, BatchRef]:
    """Return each rank's rows, and the result if each rank answers with its input."""
    calls = PROTOCOLS[name].distribute(mesh, (rows,))
    answers = [call and call[0] for call in calls]
    return answers, PROTOCOLS[name].collect(mesh, answers)


def make_answers(*counts: int) -> list[BatchRef]:
    """Return an answer with `counts[i]` rows from rank i."""
    return [BatchRef.from_stored(rank, ["x"], count) for rank, count in enumerate(counts)]


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
def test_distributed_rows_return_once_and_in_order(name: str, mesh: WorkerMesh, rows: int):
    _, back = call_through(name, mesh, make_batch(rows))
    assert rows_of(back) == list(range(rows))


@given(st.integers(1, 30), st.sampled_from([("2-4-2", (1, 2, 4, 2)), ("1-4-2", (1, 2, 2, 2))]))
def test_generation_gets_a_share_per_generating_replica(rows: int, sizes):
    train, generate = RankGrid.from_text(sizes[0]), GenerationSizes(*sizes[1])
    serving = assign_zero_redundancy(train, generate)
    answers, back = call_through(
        "P3D_ALL_MICRO_DP", WorkerMesh(train.assign_ranks(), serving), make_batch(rows)
    )
    assert rows_of(back) == list(range(rows))
    for group in serving.group_ranks("dp_rank"):
        assert all(answers[rank] == answers[group[0]] for rank in group)


def test_the_3d_call_of_hybridflow_figure_5():
    # An actor of layout 1-2-3, then a critic of 2-1-2; a batch of six rows.
    actor = make_mesh("1-2-3")
    critic = make_mesh("2-1-2")
    protocol = PROTOCOLS["P3D"]
    calls = protocol.distribute(actor, (make_batch(6),))
    rows = [rows_of(call[0]) for call in calls if call]
    assert rows == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    answers = [BatchRef.from_stored(f"rank {rank}", ["x"], 2) for rank in range(6)]
    collected = protocol.collect(actor, answers)
    assert [part.reference for part in parts_of(collected)] == ["rank 0", "rank 2", "rank 4"]
    second = protocol.distribute(critic, (collected,))
    # The first actor replica and half of the second, as whole references or slices.
    first = (RowSlice("rank 0", "x", 0, 2), RowSlice("rank 2", "x", 0, 1))
    last = (RowSlice("rank 2", "x", 1, 2), RowSlice("rank 4", "x", 0, 2))
    assert [parts_of(call[0]) for call in second if call] == [first, first, last, last]


def test_the_first_tensor_rank_of_the_last_stage_answers_for_a_replica():
    mesh = make_mesh("2-2-2")
    answers = [f"rank {rank}" for rank in range(8)]
    assert PROTOCOLS["P3D"].collect(mesh, answers) == ["rank 2", "rank 6"]
    assert PROTOCOLS["P3D_PP_ONLY"].collect(mesh, answers) == ["rank 0", "rank 2"]
    # Stages before the last return no rows.
    first, last = make_answers(2, 1)
    assert len(PROTOCOLS["P3D"].collect(make_mesh("2-1-2"), [None, first, None, last])) == 3


def test_one_to_all_all_to_all_and_rank_zero():
    mesh = make_mesh("1-2-2")
    for name in ("ONE_TO_ALL", "TO_ALL_FROM_FIRST"):
        assert PROTOCOLS[name].distribute(mesh, (7,)) == [(7,)] * 4
    assert PROTOCOLS["ALL_TO_ALL"].distribute(mesh, ([1, 2, 3, 4],)) == [(1,), (2,), (3,), (4,)]
    assert PROTOCOLS["RANK_ZERO"].distribute(mesh, (7,)) == [(7,), None, None, None]
    for name in ("RANK_ZERO", "TO_ALL_FROM_FIRST"):
        assert PROTOCOLS[name].collect(mesh, ["a", None, None, None]) == "a"
    for value, message in (
        ([1, 2, 3], "3 values for 4 ranks"),
        (5, "a int: must be a list with a value for each rank"),
        (make_batch(4), "a BatchRef: must be a list"),
    ):
        with pytest.raises(ValueError, match=message):
            PROTOCOLS["ALL_TO_ALL"].distribute(mesh, (value,))


def test_rows_are_split_as_evenly_as_possible_and_a_row_may_become_several():
    mesh, protocol = make_mesh("1-1-4"), PROTOCOLS["DP"]
    calls = protocol.distribute(mesh, (make_batch(6), "setting"))
    assert [rows_of(call[0]) for call in calls if call] == [[0, 1], [2, 3], [4], [5]]
    assert [call[1] for call in calls if call] == ["setting"] * 4
    metrics = PROTOCOLS["DP_METRIC"]
    assert metrics.distribute is protocol.distribute
    assert metrics.collect(mesh, [0.1, 0.2, 0.3, 0.4]) == [0.1, 0.2, 0.3, 0.4]
    # Two rollouts per prompt.
    protocol.check_rows(calls, make_answers(4, 4, 2, 2))
    assert len(protocol.collect(mesh, make_answers(4, 4, 2, 2))) == 12


def test_a_rank_without_rows_may_answer_with_no_columns():
    mesh, protocol = make_mesh("1-1-2"), PROTOCOLS["DP"]
    (answer,) = make_answers(1)
    protocol.check_rows(protocol.distribute(mesh, (make_batch(1),)), [answer, {}])
    assert protocol.collect(mesh, [answer, {}]) == answer
    assert protocol.collect(mesh, [answer, None]) == [answer, None]


@pytest.mark.parametrize("counts", [(4, 0), (1, 3), (2, 4), (3, 3), (0, 0)])
def test_wrong_row_counts_per_rank_are_refused(counts: tuple[int, int]):
    """Counts are checked per rank: totals may match although single ranks are wrong."""
    mesh, protocol = make_mesh("1-1-2"), PROTOCOLS["DP"]
    calls = protocol.distribute(mesh, (make_batch(4),))
    with pytest.raises(ValueError, match="rows returned per input row: must be a whole number"):
        protocol.check_rows(calls, make_answers(*counts))


def test_a_plain_dict_of_columns_is_refused():
    mesh = make_mesh("1-1-2")
    for name in ("DP", "P3D", "DP_METRIC"):
        with pytest.raises(ValueError, match=r"a dict of columns .*: pass put"):
            PROTOCOLS[name].distribute(mesh, ({"x": np.arange(3)},))
    for settings in ({"lr": 0.5}, {}):
        assert PROTOCOLS["DP"].distribute(mesh, (settings,)) == [(settings,)] * 2


def test_batches_of_a_call_must_have_equal_lengths():
    mesh = make_mesh("1-1-2")
    with pytest.raises(ValueError, match=r"batches of different lengths in a call: \[2, 4\] rows"):
        PROTOCOLS["DP"].distribute(mesh, (make_batch(2), make_batch(4)))
    with pytest.raises(ValueError, match="no layout for generation"):
        PROTOCOLS["P3D_ALL_MICRO_DP"].distribute(mesh, (make_batch(2),))


@given(st.lists(st.integers(0, 5), max_size=5), st.data())
def test_slicing_a_column_equals_slicing_its_concatenation(lengths: list[int], data: st.DataObject):
    ref = BatchRef({"x": tuple(RowSlice(i, "x", 0, n) for i, n in enumerate(lengths))})
    all_rows = [(part.reference, row) for part in parts_of(ref) for row in range(len(part))]
    start = data.draw(st.integers(0, len(ref)))
    stop = data.draw(st.integers(start, len(ref)))
    sliced = ref.slice_rows(start, stop)
    assert [
        (part.reference, row) for part in parts_of(sliced) for row in range(part.start, part.stop)
    ] == all_rows[start:stop]
    again = join_batches([ref.slice_rows(0, start), ref.slice_rows(start, len(ref))]).slice_rows(
        start, stop
    )
    assert again == sliced or len(again) == len(sliced) == 0


def test_columns_of_two_batches_are_sliced_together():
    scores = (RowSlice("a", "scores", 3, 5), RowSlice("b", "scores", 0, 2))
    half = (make_batch(4, "ids") | BatchRef({"scores": scores})).slice_rows(1, 3)
    assert half.columns == {
        "ids": (RowSlice("ids", "ids", 1, 3),),
        "scores": (RowSlice("a", "scores", 4, 5), RowSlice("b", "scores", 0, 1)),
    }
    assert half.references == ["ids", "a", "b"]
    assert join_batches([make_batch(0, "y").rename({"y": "x"}), make_batch(2)]).references == ["x"]
    with pytest.raises(ValueError, match=r"columns of \[3, 4\] rows side by side"):
        make_batch(4, "x") | make_batch(3, "y")
    with pytest.raises(ValueError, match="columns x are in both of the joined batches"):
        make_batch(4) | make_batch(4)
    with pytest.raises(ValueError, match=r"different columns: \['x'\] and \['y'\]"):
        join_batches([make_batch(1, "x"), make_batch(1, "y")])


def test_columns_are_dropped_and_renamed():
    stored = {1: {"x": [1, 2], "y": [3, 4]}}
    first = BatchRef.from_stored(1, stored[1], 2)

    def resolved(ref: BatchRef) -> dict[str, Any]:
        return ref.resolve_columns(stored)

    assert resolved(first.drop("x")) == {"y": [3, 4]}
    renamed = first.rename({"x": "y", "y": "z"})
    assert resolved(renamed) == {"y": [1, 2], "z": [3, 4]}
    assert resolved(join_batches([renamed, renamed]).slice_rows(1, 3))["y"] == [2, 1]
    for call, message in (
        (lambda: first.drop("z", "a"), "drop: the batch has no column a, z; its columns: x, y"),
        (lambda: first.rename({"z": "x"}), "rename: the batch has no column z"),
        (lambda: first.rename({"x": "y"}), "rename: two columns would be named y"),
        (lambda: first.drop("x", "y"), "a batch must have at least one column"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_columns_of_any_type_are_sliced_and_concatenated():
    import torch

    columns = {"ids": np.arange(6), "logprobs": torch.arange(6.0), "text": list("abcdef")}
    ref = BatchRef.from_stored(0, columns, count_rows(columns))
    again = join_batches(ref.split(4)).resolve_columns({0: columns})
    assert again["ids"].tolist() == list(range(6)) and again["text"] == list("abcdef")
    assert again["logprobs"].equal(columns["logprobs"])
    with pytest.raises(ValueError, match=r"different lengths \(a: 1, b: 2\)"):
        count_rows({"a": [1], "b": [1, 2]})
