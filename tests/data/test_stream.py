import json
import pickle
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.data import PromptStream
from streamrl.errors import ConfigError
from streamrl.messages import Prompt, make_uid, parse_uid

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**63)


def prompts(size, step=1):
    return [
        Prompt(make_uid(0, i * step), np.array([i, 7], np.int32), ground_truth=str(i))
        for i in range(size)
    ]


def uids(stream, count):
    return [prompt.uid for prompt in stream.draw(count)]


@given(sizes, seeds, st.booleans(), st.integers(1, 3))
def test_every_row_comes_exactly_once_per_epoch(size, seed, shuffle, step):
    stream = PromptStream(prompts(size, step), seed=seed, shuffle=shuffle)
    for epoch in range(3):
        places = [parse_uid(uid) for uid in uids(stream, size)]
        assert {place[0] for place in places} == {epoch}
        assert sorted(place[1] for place in places) == [i * step for i in range(size)]


mixes = st.lists(st.tuples(st.integers(1, 9), st.floats(0.01, 1)), min_size=1, max_size=4)
stops = st.lists(st.integers(0, 30), max_size=4)


def mixed(files, **settings):
    total = sum(share for _, share in files)
    mix = [(size, share / total) for size, share in files]
    return PromptStream(prompts(sum(size for size, _ in files)), mix=mix, **settings)


@given(mixes, seeds, st.booleans(), stops)
def test_stops_at_any_places_change_nothing_of_the_sequence(files, seed, shuffle, stops):
    whole = mixed(files, seed=seed, shuffle=shuffle)
    stream = mixed(files, seed=seed, shuffle=shuffle)
    for count in stops:
        assert uids(stream, count) == uids(whole, count)
        state = json.loads(json.dumps(stream.state_dict()))
        stream = mixed(files, seed=seed, shuffle=shuffle)
        stream.draw(2)
        stream.load_state_dict(state)
        assert stream.state_dict() == state
    assert uids(stream, 30) == uids(whole, 30)


@given(mixes, seeds, st.booleans())
def test_no_file_is_a_prompt_ahead_of_its_share_nor_far_behind(files, seed, shuffle):
    stream = mixed(files, seed=seed, shuffle=shuffle)
    total = sum(share for _, share in files)
    ends = np.cumsum([size for size, _ in files])
    drawn = [0] * len(files)
    for count in range(1, 60):
        drawn[int(np.searchsorted(ends, parse_uid(next(stream).uid)[1], side="right"))] += 1
        for n, (_, share) in zip(drawn, files, strict=True):
            ahead = n - count * share / total
            # Each of the others is ahead by less than one prompt, which is what one can be behind.
            assert -(len(files) - 1) - 1e-9 < ahead < 1


def test_two_files_take_turns_as_their_weights_say_and_have_epochs_of_their_own():
    # Shares 2/3 and 1/3: file a (rows 0 to 3), a, b (row 4, its only one), again and again.
    mix = [(4, 2 / 3), (1, 1 / 3)]
    stream = PromptStream(prompts(5), seed=0, shuffle=False, mix=mix)
    first = ["0:0:0", "0:4:0", "0:1:0", "0:2:0", "1:4:0", "0:3:0", "1:0:0", "2:4:0", "1:1:0"]
    assert uids(stream, 9) == first


def test_each_file_of_a_mix_is_shuffled_in_its_own_way_and_the_first_as_if_alone():
    alone = uids(PromptStream(prompts(20), seed=3), 20)
    found = uids(PromptStream(prompts(40), seed=3, mix=[(20, 0.5), (20, 0.5)]), 40)
    assert found[::2] == alone
    moved = [make_uid(0, parse_uid(uid)[1] - 20) for uid in found[1::2]]
    assert sorted(moved) == sorted(alone)
    assert moved != alone


def test_resuming_with_other_weights_is_refused():
    state = PromptStream(prompts(4), seed=1, mix=[(2, 0.5), (2, 0.5)]).state_dict()
    for mix in ([(2, 0.4), (2, 0.6)], [(1, 0.5), (3, 0.5)], []):
        stream = PromptStream(prompts(4), seed=1, mix=mix)
        with pytest.raises(ConfigError, match=r"each file of data.train .* was .* now"):
            stream.load_state_dict(state)


def test_a_stream_goes_to_another_process_and_leaves_the_random_numbers_of_this_one():
    import torch

    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    stream = PromptStream(prompts(9), seed=4)
    for count in (0, 5, 9):
        stream = pickle.loads(pickle.dumps(stream))
        stream.draw(count)
    assert uids(stream, 20) == uids(PromptStream(prompts(9), seed=4), 34)[14:]
    assert torch.rand(1) == wanted


def test_thousands_of_prompts_a_second_are_nothing():
    stream = PromptStream(prompts(1000), seed=0, mix=[(100, 0.5), (900, 0.5)])
    stream.draw(1)
    started = time.process_time()
    stream.draw(5000)
    # About 0.1 s here.
    assert time.process_time() - started < 2


@given(sizes, seeds, st.integers(0, 99))
def test_a_uid_gives_its_prompt_back_anywhere(size, seed, attempt):
    stream = PromptStream(prompts(size), seed=seed)
    other = PromptStream(prompts(size), seed=seed)
    for given_out in stream.draw(2 * size):
        again = other.prompt(given_out.uid)
        assert again.uid == given_out.uid
        assert again.token_ids is not None
        assert again.token_ids.tolist() == given_out.token_ids.tolist()
        assert again.ground_truth == given_out.ground_truth
        epoch, index, _ = parse_uid(given_out.uid)
        assert other.prompt(make_uid(epoch, index, attempt)).ground_truth == str(index)
    assert other.state_dict() == PromptStream(prompts(size), seed=seed).state_dict()


def test_the_order_is_fixed_by_seed_and_epoch():
    # Worked out once; another numpy or another machine must give the same.
    stream = PromptStream(prompts(6), seed=3)
    assert uids(stream, 6) == [f"0:{i}:0" for i in [0, 4, 1, 5, 3, 2]]
    assert uids(stream, 6) == [f"1:{i}:0" for i in [0, 2, 1, 3, 4, 5]]


def test_other_seeds_and_epochs_give_other_orders():
    orders = set()
    for seed in range(20):
        stream = PromptStream(prompts(50), seed=seed)
        for _ in range(5):
            orders.add(tuple(parse_uid(uid)[1] for uid in uids(stream, 50)))
    assert len(orders) == 100


def test_without_shuffling_the_order_is_that_of_the_file():
    stream = PromptStream(prompts(3, step=2), seed=5, shuffle=False)
    assert uids(stream, 4) == ["0:0:0", "0:2:0", "0:4:0", "1:0:0"]


def test_one_row_comes_again_and_again():
    assert uids(PromptStream(prompts(1), seed=0), 3) == ["0:0:0", "1:0:0", "2:0:0"]


def test_drawing_nothing_changes_nothing():
    stream = PromptStream(prompts(3), seed=0)
    before = stream.state_dict()
    assert stream.draw(0) == []
    assert stream.state_dict() == before


def test_a_retry_is_the_same_prompt_under_the_next_attempt():
    stream = PromptStream(prompts(5), seed=1)
    first = next(stream)
    second = stream.retry(stream.retry(first.uid).uid)
    epoch, index, attempt = parse_uid(second.uid)
    assert (epoch, index, attempt) == (0, parse_uid(first.uid)[1], 2)
    assert second.token_ids is first.token_ids


@pytest.mark.parametrize("uid", ["0:5:0", "3:-1:0"])
def test_a_uid_of_other_data_is_refused(uid):
    with pytest.raises(ValueError, match=f"uid {uid}: no prompt with index"):
        PromptStream(prompts(5), seed=1).prompt(uid)


def other_tokens(rows):
    return [replace(rows[0], token_ids=np.array([9, 7], np.int32)), *rows[1:]]


def other_split_of_tokens(rows):
    """The same tokens end to end, cut elsewhere."""
    first, second = rows[0].token_ids, rows[1].token_ids
    return [
        replace(rows[0], token_ids=first[:1]),
        replace(rows[1], token_ids=np.concatenate([first[1:], second])),
        *rows[2:],
    ]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda rows: rows[:-1], "number of prompts"),
        (lambda rows: [rows[1], rows[0], *rows[2:]], "fingerprint"),
        (other_tokens, "fingerprint"),
        (other_split_of_tokens, "fingerprint"),
        (lambda rows: [replace(rows[0], ground_truth="x"), *rows[1:]], "fingerprint"),
        (lambda rows: [replace(rows[0], uid="0:77:0"), *rows[1:]], "fingerprint"),
    ],
)
def test_resuming_on_other_data_is_refused(change, word):
    state = PromptStream(prompts(5), seed=1).state_dict()
    stream = PromptStream(change(prompts(5)), seed=1)
    with pytest.raises(ConfigError, match=f"cannot resume the data stream: .*{word}.* was .* now"):
        stream.load_state_dict(state)


@pytest.mark.parametrize("settings", [{"seed": 2}, {"seed": 1, "shuffle": False}])
def test_resuming_in_another_order_is_refused(settings):
    state = PromptStream(prompts(5), seed=1).state_dict()
    with pytest.raises(ConfigError, match=r"(shuffle|seed of the data order) was"):
        PromptStream(prompts(5), **settings).load_state_dict(state)


def test_a_place_is_read_as_older_checkpoints_have_it():
    stream = PromptStream(prompts(5), seed=1)
    stream.draw(3)
    state = stream.state_dict()
    loader = {
        "_sampler_iter_state": {"drawn": state.pop("drawn")},
        "_sampler_iter_yielded": 3,
        "_num_yielded": 3,
        "fetcher_state": None,
    }
    resumed = PromptStream(prompts(5), seed=1)
    resumed.load_state_dict({"loader": loader, **state})
    assert uids(resumed, 9) == uids(stream, 9)


@pytest.mark.parametrize("drawn", [[], [1, 1], [-1]])
def test_a_place_that_is_none_of_the_data_is_refused(drawn):
    state = PromptStream(prompts(5), seed=1).state_dict()
    state["drawn"] = drawn
    with pytest.raises(ValueError, match="prompts drawn of 1 files"):
        PromptStream(prompts(5), seed=1).load_state_dict(state)


def test_prompts_that_share_an_index_are_refused():
    with pytest.raises(ValueError, match="2 prompts with 1 different indices"):
        PromptStream([*prompts(1), *prompts(1)], seed=0)
    with pytest.raises(ValueError, match="0 prompts"):
        PromptStream([], seed=0)
