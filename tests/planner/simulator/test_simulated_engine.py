"""Continuous batching in closed form, against results by hand and a token-by-token model."""

import math
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.problem.stage_timings import GeneratorTiming
from streamrl.planner.simulator.simulated_engine import RunningGroup, SimulatedEngine
from streamrl.stream.stage_worker import ConcurrencyLimit
from tests.planner.notations import sampler

PLAIN = sampler(1.0, max_running=8, kv_tokens=1000)
"""A step takes a second, whoever is in it."""


def test_resume_continues_after_a_pause():
    engine: SimulatedEngine[str] = SimulatedEngine(PLAIN)
    engine.add_group("a", 1, [3], 0.0)
    assert engine.pause(0.2) == 1.0
    assert engine.next_event_s == math.inf
    engine.resume(7.0)
    assert engine.next_event_s == 9.0


def test_a_newly_free_slot_is_an_event():
    limit = ConcurrencyLimit(-1, slots_per_group=4)
    engine: SimulatedEngine[str] = SimulatedEngine(PLAIN, [limit])
    engine.add_group("a", 1, [2, 3, 6, 9], 0.0, limit)
    assert engine.next_event_s == 3.0, (
        "the first freed slot goes to a waiting rollout, the second is free"
    )
    assert (engine.advance_to(3.0), limit.free_slots) == ([], 1)
    assert engine.next_event_s == 9.0, "a second free slot is no new event"
    limit.free_slots -= 2
    engine.add_group("b", 1, [2], 3.5)
    assert engine.next_event_s == 6.0


@dataclass
class TokenByTokenEngine:
    """Reference model that simulates every token."""

    timing: GeneratorTiming
    now: float = 0.0
    version: int = -1
    running: list[list[int]] = field(default_factory=list)
    waiting: deque[list[int]] = field(default_factory=deque)
    groups: dict[int, RunningGroup[int]] = field(default_factory=dict)
    unfinished: Counter[int] = field(default_factory=Counter)
    end_times: dict[int, float] = field(default_factory=dict)

    def fill(self) -> None:
        while self.waiting and len(self.running) < self.timing.max_running:
            rollout, kv_tokens = self.waiting[0], self.timing.kv_tokens
            if self.resident + rollout[1] + len(self.running) + 1 > kv_tokens:
                break
            self.running.append(self.waiting.popleft())
            self.now += self.timing.prefill_token_s * rollout[1]

    @property
    def resident(self) -> int:
        return sum(rollout[1] for rollout in self.running)

    def make_step(self) -> None:
        self.now += self.timing.decode_step_s(len(self.running), self.resident)
        for rollout in self.running:
            rollout[1] += 1
            rollout[2] -= 1
            versions = self.groups[rollout[0]].tokens_by_version
            versions[self.version] = versions.get(self.version, 0) + 1
        done = []
        for rollout in [rollout for rollout in self.running if not rollout[2]]:
            self.running.remove(rollout)
            self.unfinished[rollout[0]] -= 1
            if not self.unfinished[rollout[0]]:
                done.append(rollout[0])
        self.end_times |= dict.fromkeys(done, self.now)
        self.now += self.timing.group_s * len(done)
        while self.running and self.resident + len(self.running) > self.timing.kv_tokens:
            self.waiting.appendleft(self.running.pop())
        self.fill()


timings = st.builds(
    GeneratorTiming,
    replicas=st.just(1),
    max_running=st.integers(1, 6),
    kv_tokens=st.integers(24, 60),
    weights_s=st.sampled_from([0.0, 1.0]),
    kv_token_s=st.sampled_from([0.0, 0.01, 0.05]),
    compute_rollout_s=st.sampled_from([0.0, 0.3, 0.6]),
    step_s=st.just(0.1),
    rollout_s=st.sampled_from([0.0, 0.05]),
    prefill_token_s=st.sampled_from([0.0, 0.02]),
    group_s=st.sampled_from([0.0, 0.04]),
)
events = st.lists(
    st.tuples(st.integers(0, 60), st.lists(st.integers(1, 20), max_size=4)), min_size=1, max_size=6
)


@given(timings, events)
def test_closed_form_matches_token_by_token(
    timing: GeneratorTiming, events: list[tuple[int, list[int]]]
):
    """Events without lengths are new versions; none arrives exactly at the end of a step."""
    engine: SimulatedEngine[int] = SimulatedEngine(timing)
    reference, end_times, versions = TokenByTokenEngine(timing), {}, {}
    for i, (tick, lengths) in enumerate(sorted(events)):
        time = 0.37 * tick + 0.001237 * i
        while engine.next_event_s <= time:
            now = engine.next_event_s
            for group in engine.advance_to(now):
                end_times[group.key], versions[group.key] = now, group.tokens_by_version
        while reference.running and reference.now < time:
            reference.make_step()
        reference.now = max(reference.now, time)
        if lengths:
            engine.add_group(i, 4, lengths, time)
            reference.groups[i] = RunningGroup(i, ConcurrencyLimit(0), 0)
            reference.unfinished[i] = len(lengths)
            reference.waiting.extend([i, 4, tokens] for tokens in lengths)
            reference.fill()
        else:
            engine.load_version(i, 0.25, time)
            reference.version = i
            reference.now += 0.25
    while engine.next_event_s < math.inf:
        now = engine.next_event_s
        for group in engine.advance_to(now):
            end_times[group.key], versions[group.key] = now, group.tokens_by_version
    while reference.running:
        reference.make_step()
    assert end_times == pytest.approx(reference.end_times)
    assert versions == {key: group.tokens_by_version for key, group in reference.groups.items()}
    assert engine.is_empty and not reference.waiting


def test_a_new_version_recomputes_the_kv_cache_unless_kept():
    end_times: dict[float, float] = {}
    for recompute_token_s in (0.0, 0.1):
        timing = GeneratorTiming(1, 8, 1e6, 0, 0, 0, 1.0, 0, 0, recompute_token_s=recompute_token_s)
        engine: SimulatedEngine[str] = SimulatedEngine(timing)
        engine.add_group("a", 5, [4], 0.0)
        # The KV cache has 5 prompt tokens and 2 sampled tokens.
        assert engine.load_version(1, 0.5, 2.0) == 2.5
        end_times[recompute_token_s] = engine.next_event_s
    assert end_times[0.0] == 4.5
    assert end_times[0.1] == 4.5 + 7 * 0.1
