import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.data.config import DataFile
from streamrl.data.prompt_file import ClassifiedRow, RowStatus
from streamrl.data.prompt_stream import PromptStream
from streamrl.errors import ConfigError, DataError
from streamrl.messages import Prompt, make_retry_uid, make_uid, parse_uid

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**63)


def prompts(size: int, step: int = 1) -> list[Prompt]:
    return [
        Prompt(make_uid(0, i * step), np.array([i, 7], np.int32), ground_truth=str(i))
        for i in range(size)
    ]


@dataclass(frozen=True)
class FakeTrainingFiles:
    """Fake of TrainingFiles with prompts in memory.

    mix: number of prompts and share of each file. statuses: by index, of rows without a prompt.
    """

    prompts: Sequence[Prompt]
    mix: Sequence[tuple[int, float]] = ()
    statuses: Mapping[int, RowStatus] = field(default_factory=dict)
    fingerprint: str = "0"

    @property
    def shares(self) -> list[float]:
        return [share for _, share in self.mix] or [1.0]

    @property
    def files(self) -> list[Any]:
        indices = np.array([parse_uid(prompt.uid)[1] for prompt in self.prompts])
        sizes = [size for size, _ in self.mix] or [len(indices)]
        prompt_file = SimpleNamespace(file=DataFile("rows.jsonl"), make_prompts=self.make_prompts)
        return [
            SimpleNamespace(row_indices=part, prompt_file=prompt_file)
            for part in np.split(indices, np.cumsum(sizes)[:-1])
        ]

    def make_prompts(self, indices: Sequence[int]) -> list[ClassifiedRow]:
        by_index = {parse_uid(prompt.uid)[1]: prompt for prompt in self.prompts}
        return [self._classify_row(by_index[index], index) for index in indices]

    def _classify_row(self, prompt: Prompt, index: int) -> ClassifiedRow:
        status = self.statuses.get(index, RowStatus.KEPT)
        if status is RowStatus.KEPT:
            return ClassifiedRow(status, index, 2, prompt)
        problem = ConfigError(f"row {index}: no good") if status is RowStatus.BAD else None
        return ClassifiedRow(status, index, problem=problem)


def stream_of(
    items: Sequence[Prompt],
    *,
    seed: int,
    mix: Sequence[tuple[int, float]] = (),
    statuses: Mapping[int, RowStatus] | None = None,
    fingerprint: str = "0",
    **settings: Any,
) -> PromptStream:
    data: Any = FakeTrainingFiles(items, mix, statuses or {}, fingerprint)
    return PromptStream(data, seed=seed, **settings)


def uids(stream, count):
    return [prompt.uid for prompt in stream.draw_prompts(count)]


@given(sizes, seeds, st.booleans(), st.integers(1, 3))
def test_every_row_occurs_once_per_epoch(size, seed, shuffle, step):
    stream = stream_of(prompts(size, step), seed=seed, shuffle=shuffle)
    for epoch in range(3):
        positions = [parse_uid(uid) for uid in uids(stream, size)]
        assert {position[0] for position in positions} == {epoch}
        assert sorted(position[1] for position in positions) == [i * step for i in range(size)]


mixes = st.lists(st.tuples(st.integers(1, 9), st.floats(0.01, 1)), min_size=1, max_size=4)
stops = st.lists(st.integers(0, 30), max_size=4)


def mixed(files, **settings):
    total = sum(share for _, share in files)
    mix = [(size, share / total) for size, share in files]
    return stream_of(prompts(sum(size for size, _ in files)), mix=mix, **settings)


@given(mixes, seeds, st.booleans())
def test_every_file_stays_close_to_its_share(files, seed, shuffle):
    stream = mixed(files, seed=seed, shuffle=shuffle)
    total = sum(share for _, share in files)
    ends = np.cumsum([size for size, _ in files])
    drawn = [0] * len(files)
    for count in range(1, 60):
        drawn[int(np.searchsorted(ends, parse_uid(next(stream).uid)[1], side="right"))] += 1
        for n, (_, share) in zip(drawn, files, strict=True):
            ahead = n - count * share / total
            # Every other file is less than one prompt ahead, which bounds the deficit of this one.
            assert -(len(files) - 1) - 1e-9 < ahead < 1


def test_two_files_interleave_by_weight_with_separate_epochs():
    # Shares 2/3 and 1/3 repeat the pattern a, b, a: file a has rows 0 to 3, file b only row 4.
    mix = [(4, 2 / 3), (1, 1 / 3)]
    stream = stream_of(prompts(5), seed=0, shuffle=False, mix=mix)
    first = ["0:0:0", "0:4:0", "0:1:0", "0:2:0", "1:4:0", "0:3:0", "1:0:0", "2:4:0", "1:1:0"]
    assert uids(stream, 9) == first


def test_each_file_has_its_own_shuffle():
    single_uids = uids(stream_of(prompts(20), seed=3), 20)
    mixed_uids = uids(stream_of(prompts(40), seed=3, mix=[(20, 0.5), (20, 0.5)]), 40)
    assert mixed_uids[::2] == single_uids
    shifted = [make_uid(0, parse_uid(uid)[1] - 20) for uid in mixed_uids[1::2]]
    assert sorted(shifted) == sorted(single_uids)
    assert shifted != single_uids


def test_the_order_is_fixed_by_seed_and_epoch():
    # Golden values: other numpy versions and machines must give the same order.
    stream = stream_of(prompts(6), seed=3)
    assert uids(stream, 6) == [f"0:{i}:0" for i in [0, 4, 1, 5, 3, 2]]
    assert uids(stream, 6) == [f"1:{i}:0" for i in [0, 2, 1, 3, 4, 5]]


def test_a_retry_is_the_same_prompt_under_the_next_attempt():
    stream = stream_of(prompts(5), seed=1)
    first = next(stream)
    second = stream.get_prompt(make_retry_uid(make_retry_uid(first.uid)))
    epoch, index, attempt = parse_uid(second.uid)
    assert (epoch, index, attempt) == (0, parse_uid(first.uid)[1], 2)
    assert second.token_ids is first.token_ids


# No bad rows: more than a few would end the stream.
statuses = st.dictionaries(
    st.integers(0, 39), st.sampled_from([RowStatus.FILTERED, RowStatus.TOO_LONG]), max_size=20
)


@given(mixes, seeds, st.booleans(), statuses, stops)
def test_resume_at_any_position_continues_the_sequence_without_unusable_rows(
    files, seed, shuffle, statuses, stops
):
    # The first row of each file is usable.
    ends = np.cumsum([0, *(size for size, _ in files)])
    statuses = {index: status for index, status in statuses.items() if index not in ends[:-1]}
    size = int(ends[-1])
    settings: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "statuses": statuses}
    uninterrupted = mixed(files, **settings)
    stream, num_reported = mixed(files, **settings), 0
    for count in stops:
        assert uids(stream, count) == uids(uninterrupted, count)
        num_reported += sum(stream.take_skipped().metrics.values())
        state = json.loads(json.dumps(stream.state_dict()))
        stream = mixed(files, **settings)
        next(stream)
        stream.load_state_dict(state)
        stream.take_skipped()
        assert stream.state_dict() == state
    drawn_uids = uids(stream, 2 * size)
    assert drawn_uids == uids(uninterrupted, 2 * size)
    assert not {parse_uid(uid)[1] for uid in drawn_uids} & statuses.keys()
    num_reported += sum(stream.take_skipped().metrics.values())
    assert num_reported == sum(uninterrupted.take_skipped().metrics.values())
    state = uninterrupted.state_dict()
    assert sum(state["drawn"]) - sum(state["given"]) == num_reported


@given(seeds)
def test_shares_count_prompts_and_not_skipped_rows(seed):
    bad = dict.fromkeys(range(1, 10), RowStatus.BAD)
    stream = mixed([(10, 0.5), (10, 0.5)], seed=seed, statuses=bad)
    indices = [parse_uid(uid)[1] for uid in uids(stream, 20)]
    assert sorted(index for index in indices if index >= 10) == list(range(10, 20))
    # Only one row of the first file is usable, so it passes through ten epochs.
    assert indices.count(0) == 10


def test_a_bad_row_is_reported_and_counted_by_status():
    statuses = {1: RowStatus.BAD, 2: RowStatus.TOO_LONG, 3: RowStatus.FILTERED, 4: RowStatus.BAD}
    stream = stream_of(prompts(6), seed=0, shuffle=False, statuses=statuses)
    assert uids(stream, 3) == ["0:0:0", "0:5:0", "1:0:0"]
    skipped = stream.take_skipped()
    assert skipped.problems == ["row 1: no good", "row 4: no good"]
    assert skipped.metrics == {
        "data/too_long": 1,
        "data/filtered": 1,
        "data/bad": 2,
    }
    assert sum(stream.take_skipped().metrics.values()) == 0


def test_too_many_bad_rows_end_the_stream():
    statuses = dict.fromkeys(range(0, 3000, 2), RowStatus.BAD)
    stream = stream_of(prompts(3000), seed=0, shuffle=False, statuses=statuses)
    with pytest.raises(DataError, match=r"101 of the last 201 rows are unusable, .*row 200"):
        stream.draw_prompts(3000)
    filtered = stream_of(prompts(3), seed=0, statuses=dict.fromkeys(range(3), RowStatus.FILTERED))
    with pytest.raises(DataError, match="none of its 3 rows yields a prompt"):
        next(filtered)


async def test_prefetching_in_a_thread_keeps_the_position():
    stream = stream_of(prompts(9), seed=4)
    fresh = stream_of(prompts(9), seed=4)
    before = stream.state_dict()
    await stream.prefetch_prompts(5)
    assert stream.state_dict() == before
    copied = pickle.loads(pickle.dumps(stream))
    expected = uids(fresh, 12)
    assert uids(stream, 12) == expected
    assert uids(copied, 12) == expected


@pytest.mark.parametrize(
    ("size", "settings", "words"),
    [
        (4, {}, r"number of prompts in data.train was 6 .* is 4 now"),
        (6, {"fingerprint": "1"}, r"fingerprint\), was 0 .* is 1 now"),
        (6, {"mix": [(3, 0.4), (3, 0.6)]}, r"share of each file in data.train was .* now"),
        (6, {"mix": [(2, 0.5), (4, 0.5)]}, r"share of each file in data.train was .* now"),
        (6, {"seed": 2}, "seed of the data order was"),
        (6, {"shuffle": False}, "data.shuffle was"),
    ],
)
def test_resume_on_other_data_or_in_another_order_is_refused(size, settings, words):
    mix = [(3, 0.5), (3, 0.5)]
    state = stream_of(prompts(6), seed=1, mix=mix).state_dict()
    other = stream_of(prompts(size), **{"seed": 1, "mix": mix if size == 6 else [], **settings})
    with pytest.raises(ConfigError, match=words):
        other.load_state_dict(state)
