"""What a hybrid worker holds, as sums a person can check, and budgets."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ConfigError
from streamrl.placement import WorkerMemory

MB = 1 << 20
SIZES = ("weights", "served", "optimizer", "gradients", "activations", "update", "kv")


def held(**other: int) -> WorkerMemory:
    """4 of weights, 8 of optimizer, 4 of gradients, 30 of activations, 64 of KV cache; 12 for the
    update, which is less than activations.
    """
    sizes = {"weights": 4, "serving_weights": 0, "optimizer": 8, "gradients": 4, "activations": 30}
    sizes |= {"update_buffers": 12, "kv_cache": 64}
    held: dict[str, Any] = {name: size * MB for name, size in {**sizes, **other}.items()}
    return WorkerMemory(**held)


def test_what_is_held_is_said_by_phase_as_a_sum() -> None:
    assert held().generate_bytes == (4 + 8 + 4 + 64) * MB
    assert held().train_bytes == (4 + 8 + 4 + 30 + 64) * MB
    assert held(serving_weights=5).summary_line == (
        "memory: a worker holds 85 MB to generate = 4 weights + 5 the generator's weights"
        " + 8 optimizer + 4 gradients + 64 KV cache, and about 115 MB to train = 4 weights"
        " + 5 the generator's weights + 8 optimizer + 4 gradients + 30 activations + 64 KV cache"
    )


@pytest.mark.parametrize(
    ("budget_mb", "releases", "offloads"),
    [
        (None, False, False),
        (110, False, False),
        (109, True, False),
        (80, True, False),
        (79, True, True),
        (72, True, True),
    ],
)
def test_what_does_not_fit_and_only_that_is_given_up(
    budget_mb: int | None, releases: bool, offloads: bool
) -> None:
    found = held().fit_budget(budget_mb)
    assert (found.releases_kv, found.offloads_optimizer) == (releases, offloads)
    assert ("; the KV cache is released while it trains" in found.summary_line) is releases
    assert (
        "the optimizer's state is offloaded while it generates" in found.summary_line
    ) is offloads
    assert budget_mb is None or max(found.train_bytes, found.generate_bytes) <= budget_mb * MB


def test_a_budget_that_can_never_be_kept_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError) as refused:
        held().fit_budget(71)
    assert str(refused.value) == (
        "placement.memory_mb=71: to generate, a worker holds 72 MB = 4 weights + 4 gradients"
        " + 64 KV cache"
    )
    with pytest.raises(ConfigError, match=r"to train, a worker holds 116 MB = .* 100 activations"):
        held(activations=100).fit_budget(90)


def test_an_update_that_takes_more_than_a_micro_batch_is_the_peak() -> None:
    found = held(update_buffers=40)
    assert found.train_bytes == (4 + 8 + 4 + 40 + 64) * MB
    assert found.generate_bytes == held().generate_bytes
    assert found.format_sum("train") == (
        "4 weights + 8 optimizer + 4 gradients + 40 for the update + 64 KV cache"
    )
    assert (held().fit_budget(110).releases_kv, found.fit_budget(110).releases_kv) == (False, True)
    with pytest.raises(ConfigError, match=r"to train, a worker holds 106 MB = .* 90 for the upd"):
        held(update_buffers=90).fit_budget(105)


@given(st.fixed_dictionaries({name: st.integers(0, 50) for name in SIZES}), st.integers(1, 400))
def test_a_budget_is_kept_or_refused_and_nothing_is_given_up_in_vain(
    sizes: dict[str, int], budget_mb: int
) -> None:
    every = held(**sizes)
    try:
        found = every.fit_budget(budget_mb)
    except ConfigError:
        least = replace(every, releases_kv=True, offloads_optimizer=True)
        assert max(least.train_bytes, least.generate_bytes) > budget_mb * MB
        return
    assert max(found.train_bytes, found.generate_bytes) <= budget_mb * MB
    assert found.releases_kv is (every.train_bytes > budget_mb * MB)
    assert found.offloads_optimizer is (every.generate_bytes > budget_mb * MB)
    spoken = [found.format_sum("train"), found.format_sum("generate")]
    sums = [sum(int(part.split()[0]) for part in text.split(" + ") if part) for text in spoken]
    assert sums == [found.train_bytes // MB, found.generate_bytes // MB]
