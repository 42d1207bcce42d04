"""Transfer protocols: every row goes where it belongs, comes back once, and padding never does."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.controller.batches import BatchRef, Part, concatenate, cut, join, num_rows
from streamrl.controller.collect import Answers, given_by
from streamrl.controller.transfer_protocols import (
    PROTOCOLS,
    Distribute,
    Handed,
    Mesh,
    Protocol,
    add_protocol,
    by_replica,
    from_replicas,
)
from streamrl.resharding import GenerationSizes, Grid, zero_redundancy


def batch(rows: int, name: str = "x") -> BatchRef:
    return BatchRef.of(Part(name, 0, rows))


def parts_of(ref: BatchRef) -> tuple[Part, ...]:
    (strip,) = ref.strips
    return strip.parts


def rows_of(ref: BatchRef) -> list[int]:
    return [row for part in parts_of(ref) for row in range(part.start, part.stop)]


def calls_of(handed: Handed) -> list[tuple[Any, ...]]:
    """Fail if a rank is not called."""
    assert None not in handed.calls
    return [call for call in handed.calls if call is not None]


def through(name: str, mesh: Mesh, given: BatchRef) -> tuple[list, BatchRef]:
    """What each rank got, and what comes back if each answers with what it got."""
    handed = PROTOCOLS[name].hand_out(mesh, (given,))
    answers = [call and call[0] for call in handed.calls]
    return answers, collected(name, mesh, handed, answers)


def collected(name: str, mesh: Mesh, handed: Handed, answers: Sequence[Any], **knows: bool) -> Any:
    """What becomes of answers to what was handed out."""
    protocol = PROTOCOLS[name]
    given = given_by(handed, protocol, "W.do", **{"knows": False, **knows})
    names = [f"W-{rank}.do" for rank in range(mesh.size)]
    return protocol.collect(mesh, Answers(answers, given, protocol.answers, names, **knows))


def came_back(*counts: int) -> list[BatchRef]:
    """So many rows from each rank."""
    return [BatchRef.of(Part(rank, 0, count)) for rank, count in enumerate(counts)]


MESHES = st.builds(
    lambda stages, tensor, replicas, order: Mesh(Grid(stages, tensor, replicas, order).seating()),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["hf", "mcore"]),
)


@given(st.sampled_from(["DP", "P3D"]), MESHES, st.integers(0, 30))
def test_what_is_handed_out_comes_back_once_and_in_order(name: str, mesh: Mesh, rows: int) -> None:
    _, back = through(name, mesh, batch(rows))
    assert rows_of(back) == list(range(rows))


@given(st.integers(1, 30), st.sampled_from([("2-4-2", "1-2-4-2"), ("1-4-2", "1-2-2-2")]))
def test_generation_has_a_share_for_each_of_its_own_replicas(rows: int, sizes) -> None:
    train, generate = Grid.parse(sizes[0]), GenerationSizes.parse(sizes[1])
    serving = zero_redundancy(train, generate)
    answers, back = through("P3D_ALL_MICRO_DP", Mesh(train.seating(), serving), batch(rows))
    assert rows_of(back) == list(range(rows))
    for group in serving.replica_groups():
        assert len({answers[rank] for rank in group}) == 1, "all ranks of a replica get the same"
    shares = {answers[group[0]] for group in serving.replica_groups()}
    assert sum(len(share) for share in shares) >= rows


def test_a_3d_call_of_the_papers_figure_5() -> None:
    # An actor of 1-2-3, then a critic of 2-1-2; a batch of six.
    actor = Mesh(Grid.parse("1-2-3").seating())
    critic = Mesh(Grid.parse("2-1-2").seating())
    protocol = PROTOCOLS["P3D"]
    handed = protocol.distribute(actor, (batch(6),))
    assert [rows_of(call[0]) for call in calls_of(handed)] == [
        [0, 1],
        [0, 1],
        [2, 3],
        [2, 3],
        [4, 5],
        [4, 5],
    ]
    answers = [BatchRef.of(Part(f"rank {rank}", 0, 2)) for rank in range(6)]
    collected = protocol.collect(actor, answers)
    assert [part.reference for part in parts_of(collected)] == ["rank 0", "rank 2", "rank 4"]
    second = protocol.distribute(critic, (collected,))
    # All of the first actor replica and half of the second, whole references or slices of them.
    first = (Part("rank 0", 0, 2), Part("rank 2", 0, 1))
    assert [parts_of(call[0]) for call in calls_of(second)] == [
        first,
        first,
        (Part("rank 2", 1, 2), Part("rank 4", 0, 2)),
        (Part("rank 2", 1, 2), Part("rank 4", 0, 2)),
    ]


def test_the_last_stages_first_tensor_rank_speaks_for_a_replica() -> None:
    mesh = Mesh(Grid.parse("2-2-2").seating())
    answers = [f"rank {rank}" for rank in range(8)]
    assert PROTOCOLS["P3D"].collect(mesh, answers) == ["rank 2", "rank 6"]
    assert PROTOCOLS["P3D_PP_ONLY"].collect(mesh, answers) == ["rank 0", "rank 2"]


def test_one_for_all_one_for_each_and_one_for_the_first() -> None:
    mesh = Mesh(Grid.parse("1-2-2").seating())
    assert PROTOCOLS["ONE_TO_ALL"].distribute(mesh, (7,)).calls == ((7,),) * 4
    assert PROTOCOLS["ALL_TO_ALL"].distribute(mesh, ([1, 2, 3, 4],)).calls == (
        (1,),
        (2,),
        (3,),
        (4,),
    )
    assert PROTOCOLS["RANK_ZERO"].distribute(mesh, (7,)).calls == ((7,), None, None, None)
    assert PROTOCOLS["RANK_ZERO"].collect(mesh, ["a", None, None, None]) == "a"
    for value, told in (
        ([1, 2, 3], "3 values for 4 ranks"),
        (5, "a int: must be a list with a value for each rank"),
        (batch(4), "a BatchRef: must be a list"),
    ):
        with pytest.raises(ValueError, match=told):
            PROTOCOLS["ALL_TO_ALL"].distribute(mesh, (value,))


def test_figures_come_from_every_rank() -> None:
    mesh = Mesh(Grid.parse("1-1-3").seating())
    handed = PROTOCOLS["DP_METRIC"].distribute(mesh, (batch(4), "setting"))
    assert [(len(share), setting) for share, setting in calls_of(handed)] == [(2, "setting")] * 3
    assert PROTOCOLS["DP_METRIC"].collect(mesh, [0.1, 0.2, 0.3]) == [0.1, 0.2, 0.3]


def test_a_prompt_may_become_several_rows_and_padding_goes_with_all_of_its_own() -> None:
    mesh = Mesh(Grid.parse("1-1-4").seating())
    handed = PROTOCOLS["DP"].hand_out(mesh, (batch(6),))
    assert [call[0].padding for call in handed.calls if call] == [0, 0, 0, 2]
    # Two rollouts of each prompt.
    assert len(collected("DP", mesh, handed, came_back(4, 4, 4, 4))) == 12


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ((4, 0), r"W-1\.do: 0 rows came back for 2: must be as many"),
        ((1, 3), r"W-0\.do: 1 rows came back for 2"),
        ((2, 4), r"W-1\.do: 2 rows came back for each, from another rank 1"),
    ],
)
@pytest.mark.parametrize("rows", [3, 4])
def test_rows_never_pass_for_those_of_another_rank(
    rows: int, counts: tuple[int, int], told: str
) -> None:
    """All together they are as many as were handed out, or twice as many."""
    mesh = Mesh(Grid.parse("1-1-2").seating())
    handed = PROTOCOLS["DP"].hand_out(mesh, (batch(rows),))
    with pytest.raises(ValueError, match=told):
        collected("DP", mesh, handed, came_back(*counts))


def test_padding_is_taken_off_where_it_came_back_whatever_the_protocol(monkeypatch) -> None:
    monkeypatch.setattr(
        "streamrl.controller.transfer_protocols.PROTOCOLS", protocols := dict(PROTOCOLS)
    )

    def backwards(mesh: Mesh, arguments: tuple[Any, ...]) -> Handed:
        pieces = arguments[0].padded(mesh.size).split(mesh.size)
        return Handed(tuple((piece,) for piece in reversed(pieces)))

    own = add_protocol("TURNED_ROUND", backwards, PROTOCOLS["DP"].collect)
    assert protocols["TURNED_ROUND"] is own
    mesh = Mesh(Grid.parse("1-1-2").seating())
    handed = own.hand_out(mesh, (batch(3),))
    answers = [call and call[0] for call in handed.calls]
    given = given_by(handed, own, "W.do", knows=False)
    assert [each.real for each in given] == [1, 2]
    back = own.collect(mesh, Answers(answers, given, own.answers, ["a", "b"]))
    assert rows_of(back) == [2, 0, 1]


def test_no_figure_counts_padding_unless_the_method_knows_of_it() -> None:
    mesh = Mesh(Grid.parse("1-1-2").seating())
    handed = PROTOCOLS["DP_METRIC"].hand_out(mesh, (batch(3),))
    told = r"W\.do: 1 of 4 rows are padding, which would count in the figures of 2 ranks: give rows"
    with pytest.raises(ValueError, match=told):
        given_by(handed, PROTOCOLS["DP_METRIC"], "W.do", knows=False)
    assert collected("DP_METRIC", mesh, handed, [0.5, 2.0], knows=True) == [0.5, 2.0]
    handed = PROTOCOLS["DP"].hand_out(mesh, (batch(3),))
    for nothing_of_rows in (0.5, None):
        with pytest.raises(ValueError, match=r"W-1\.do: 1 of its 2 rows are padding, which counts"):
            collected("DP", mesh, handed, [nothing_of_rows] * 2)
    # A method that knows answers for itself, with as many rows as it likes.
    assert len(collected("DP", mesh, handed, came_back(1, 0), knows=True)) == 1


def test_answers_that_do_not_count_are_not_looked_at() -> None:
    """Stages before the last have nothing to say."""
    mesh = Mesh(Grid.parse("2-1-2").seating())
    handed = PROTOCOLS["P3D"].hand_out(mesh, (batch(3),))
    first, last = came_back(2, 2)
    assert len(collected("P3D", mesh, handed, [None, first, None, last])) == 3


def test_what_is_handed_out_is_a_call_for_each_rank() -> None:
    mesh = Mesh(Grid.parse("1-1-2").seating())
    wrong: list[tuple[Any, str]] = [
        (Handed(((1,),) * 5), "protocol OWN: its distribute gave 5 calls for 2 ranks"),
        (Handed(((1,),)), "gave 1 calls for 2 ranks"),
        ([(1,), (1,)], "protocol OWN: its distribute gave a list, not a Handed"),
    ]

    def giving(handed: Any) -> Distribute:
        return lambda mesh, arguments: handed

    for handed, told in wrong:
        own = Protocol("OWN", giving(handed), PROTOCOLS["DP"].collect)
        with pytest.raises(ValueError, match=told):
            own.hand_out(mesh, ())


def test_columns_in_a_dict_are_handed_to_nobody() -> None:
    mesh = Mesh(Grid.parse("1-1-2").seating())
    for name in ("DP", "P3D", "DP_METRIC"):
        with pytest.raises(ValueError, match=r"columns in a dict .*: hand over put"):
            PROTOCOLS[name].hand_out(mesh, ({"x": np.arange(3)},))
    for settings in ({"lr": 0.5}, {}):
        assert PROTOCOLS["DP"].hand_out(mesh, (settings,)).calls == ((settings,),) * 2


def test_batches_of_a_call_have_one_length() -> None:
    mesh = Mesh(Grid.parse("1-1-2").seating())
    with pytest.raises(ValueError, match=r"batches of \[2, 4\] rows in one call"):
        PROTOCOLS["DP"].distribute(mesh, (batch(2), batch(4)))
    with pytest.raises(ValueError, match="no seating for generation"):
        PROTOCOLS["P3D_ALL_MICRO_DP"].distribute(mesh, (batch(2),))


def test_a_users_own_protocol_is_known_by_its_name(monkeypatch) -> None:
    monkeypatch.setattr("streamrl.controller.transfer_protocols.PROTOCOLS", dict(PROTOCOLS))

    def seating(mesh: Mesh):
        return mesh.train

    own = add_protocol("FIRST_HALF", by_replica(seating), lambda mesh, answers: answers[0])
    mesh = Mesh(Grid.parse("1-1-2").seating())
    assert own.collect(mesh, ["a", "b"]) == "a"
    with pytest.raises(ValueError, match="protocol P3D: there is one of that name"):
        add_protocol("P3D", by_replica(seating), from_replicas(seating))


@given(st.lists(st.integers(0, 5), max_size=5), st.data())
def test_rows_of_parts_are_rows_of_the_whole(lengths: list[int], data: st.DataObject) -> None:
    ref = BatchRef.of(*(Part(i, 0, length) for i, length in enumerate(lengths)))
    every = [(part.reference, row) for part in parts_of(ref) for row in range(len(part))]
    start = data.draw(st.integers(0, len(ref)))
    stop = data.draw(st.integers(start, len(ref)))
    found = ref.rows(start, stop)
    assert [
        (part.reference, row) for part in parts_of(found) for row in range(part.start, part.stop)
    ] == every[start:stop]
    again = join([ref.rows(0, start), ref.rows(start, len(ref))]).rows(start, stop)
    assert again == found or len(again) == len(found) == 0


def test_no_rows_still_have_columns() -> None:
    mesh = Mesh(Grid.parse("1-1-2").seating())
    answers, back = through("DP", mesh, batch(0))
    assert [parts_of(answer) for answer in answers] == [(Part("x", 0, 0),)] * 2
    assert parts_of(back) == (Part("x", 0, 0),)
    # Beside rows they are nothing that would have to be fetched.
    assert parts_of(join([batch(0, "y"), batch(2)])) == (Part("x", 0, 2),)


def test_columns_side_by_side_are_cut_together() -> None:
    both = batch(4, "ids") | BatchRef.of(Part("scores", 3, 5), Part("more", 0, 2))
    half = both.rows(1, 3)
    assert [strip.parts for strip in half.strips] == [
        (Part("ids", 1, 3),),
        (Part("scores", 4, 5), Part("more", 0, 1)),
    ]
    with pytest.raises(ValueError, match=r"columns of \[3, 4\] rows side by side"):
        batch(4) | batch(3)


@given(st.integers(1, 7), st.integers(1, 20))
def test_padding_repeats_from_the_beginning(rows: int, multiple: int) -> None:
    full = rows_of(batch(rows).padded(multiple))
    assert len(full) % multiple == 0 and len(full) - rows < multiple
    assert full == [i % rows for i in range(len(full))]


def test_columns_of_any_kind_are_cut_and_joined() -> None:
    import torch

    whole = {"ids": np.arange(6), "logprobs": torch.arange(6.0), "text": list("abcdef")}
    pieces = [cut(whole, 0, 2), cut(whole, 2, 6)]
    again = concatenate(pieces)
    assert again["ids"].tolist() == list(range(6)) and again["text"] == list("abcdef")
    assert again["logprobs"].equal(whole["logprobs"])
    with pytest.raises(ValueError, match=r"different lengths \(a: 1, b: 2\)"):
        num_rows({"a": [1], "b": [1, 2]})
    with pytest.raises(ValueError, match="different columns"):
        concatenate([{"a": [1]}, {"b": [1]}])
