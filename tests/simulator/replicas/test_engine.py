"""Continuous batching in closed form, against results by hand and a token-by-token model."""

import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.placement.stage_timings import GeneratorTiming
from streamrl.placement.steady_state.call_durations import CAPACITY_TOLERANCE, GenerationModel
from streamrl.placement.workload import FixedLength, Workload
from streamrl.simulator.replicas.engine import RunningGroup, SimulatedEngine
from streamrl.stream.stage_worker import ConcurrencyLimit
from tests.placement.simple_costs import sampler

PLAIN = sampler(1.0, max_running=8, kv_tokens=1000)
"""A step takes a second, whoever is in it."""


def run(engine: SimulatedEngine[str]) -> dict[str, float]:
    """Advance to the end of all groups; return when each finished."""
    ends: dict[str, float] = {}
    while engine.next_event_s < math.inf:
        now = engine.next_event_s
        ends |= {group.key: now for group in engine.advance_to(now)}
    return ends


def test_a_group_finishes_with_its_longest_rollout():
    engine: SimulatedEngine[str] = SimulatedEngine(PLAIN)
    engine.add_group("a", 2, [3, 5], 10.0)
    assert run(engine) == {"a": 15.0}
    assert (engine.is_empty, engine.resident_tokens, engine.decode_steps) == (True, 0, 5)


def test_step_time_grows_with_kv_cache_tokens():
    # Two rollouts with 2 prompt tokens: 4, 6 and 8 tokens in the KV cache before the three steps.
    engine: SimulatedEngine[str] = SimulatedEngine(replace(PLAIN, kv_token_s=0.5))
    engine.add_group("a", 2, [3, 3], 0.0)
    assert run(engine) == {"a": (1 + 2) + (1 + 3) + (1 + 4)}


def test_a_step_is_compute_bound_until_it_is_memory_bound():
    # One rollout: memory time 1.5, 2, 2.5 s; compute time 2.2 s.
    engine: SimulatedEngine[str] = SimulatedEngine(
        replace(PLAIN, kv_token_s=0.5, compute_rollout_s=2.2)
    )
    engine.add_group("a", 1, [3], 0.0)
    assert run(engine) == {"a": pytest.approx(2.2 + 2.2 + 2.5)}


def test_a_group_added_during_a_step_starts_with_the_next():
    engine: SimulatedEngine[str] = SimulatedEngine(PLAIN)
    engine.add_group("a", 1, [4], 0.0)
    engine.add_group("b", 1, [2], 1.5)
    assert run(engine) == {"a": 4.0, "b": 4.0}


def test_prefill_precedes_the_next_step():
    engine: SimulatedEngine[str] = SimulatedEngine(replace(PLAIN, prefill_token_s=0.1))
    engine.add_group("a", 10, [1, 1], 0.0)
    assert run(engine) == {"a": 2 + 1.0}


def test_delivering_a_group_delays_the_next_step():
    engine: SimulatedEngine[str] = SimulatedEngine(replace(PLAIN, group_s=0.25))
    engine.add_group("a", 1, [2], 0.0)
    engine.add_group("b", 1, [2], 0.0)
    engine.add_group("c", 1, [3, 1], 0.0)
    assert run(engine) == {"a": 2.0, "b": 2.0, "c": 3 + 2 * 0.25}


def test_rollouts_beyond_max_running_wait_for_a_slot():
    engine: SimulatedEngine[str] = SimulatedEngine(replace(PLAIN, max_running=2))
    engine.add_group("a", 1, [2, 3, 2], 0.0)
    assert run(engine) == {"a": 4.0}


def test_rollouts_beyond_the_kv_cache_wait():
    # KV cache of 20 tokens: 3 * 4 + 3 fit when the third rollout starts, but not 18 at the end.
    engine: SimulatedEngine[str] = SimulatedEngine(replace(PLAIN, kv_tokens=9))
    engine.add_group("a", 3, [3], 0.0)
    engine.add_group("b", 3, [3], 0.0)
    assert engine.num_running == 2
    engine.add_group("c", 3, [3], 0.0)
    assert engine.num_running == 2


def test_a_full_kv_cache_preempts_the_newest_rollout():
    # Both have 4 tokens after a step and 5 after two; the KV cache holds 10, so that the
    # second is preempted, and prefilled again when the first finishes after its third step.
    timing = replace(PLAIN, kv_tokens=10, prefill_token_s=0.01)
    engine: SimulatedEngine[str] = SimulatedEngine(timing)
    engine.add_group("a", 3, [4], 0.0)
    engine.add_group("b", 3, [4], 0.0)
    ends = run(engine)
    assert engine.num_preempted == 1
    assert ends == {"a": pytest.approx(4.06), "b": pytest.approx(4.06 + 0.05 + 2)}


def test_every_token_keeps_the_version_that_sampled_it():
    engine: SimulatedEngine[str] = SimulatedEngine(PLAIN)
    engine.load_version(3, 0.0, 0.0)
    engine.add_group("a", 1, [5, 2], 0.0)
    assert engine.load_version(4, 0.5, 2.5) == 3.5
    (group,) = engine.advance_to(engine.next_event_s)
    assert group.tokens_by_version == {3: 3 + 2, 4: 2}
    assert engine.now == 5.5


def test_resume_continues_after_a_pause():
    engine: SimulatedEngine[str] = SimulatedEngine(PLAIN)
    engine.add_group("a", 1, [3], 0.0)
    assert engine.pause(0.2) == 1.0
    assert engine.next_event_s == math.inf
    engine.resume(7.0)
    assert run(engine) == {"a": 9.0}


def test_count_sampled_tokens_covers_unfinished_groups():
    engine: SimulatedEngine[str] = SimulatedEngine(PLAIN)
    engine.add_group("a", 1, [1, 1], 0.0)
    engine.add_group("b", 1, [2, 9], 0.0)
    engine.advance_to(1.0)
    engine.pause(3.0)
    assert engine.count_sampled_tokens() == 2 + 3


def test_a_newly_free_slot_is_an_event():
    kind = ConcurrencyLimit(-1, slots_per_group=4)
    engine: SimulatedEngine[str] = SimulatedEngine(PLAIN, [kind])
    engine.add_group("a", 1, [2, 3, 6, 9], 0.0, kind)
    assert engine.next_event_s == 3.0, "one gives its place to who has none, the next one is free"
    assert (engine.advance_to(3.0), kind.free_slots) == ([], 1)
    assert engine.next_event_s == 9.0, "who has free places asks already"
    kind.free_slots -= 2
    engine.add_group("b", 1, [2], 3.5)
    assert engine.next_event_s == 6.0


def test_a_slot_freed_at_the_end_of_the_current_step_is_an_event():
    kind = ConcurrencyLimit(0, slots_per_group=2)
    engine: SimulatedEngine[str] = SimulatedEngine(PLAIN, [kind])
    engine.add_group("a", 1, [2, 9], 0.0, kind)
    engine.load_version(1, 5.0, 1.5)
    assert (engine.next_event_s, kind.free_slots) == (2.0, 1)
    assert engine.advance_to(2.0) == []
    assert engine.next_event_s == 5.0 + 9.0


@dataclass
class TokenByTokenEngine:
    """Reference model that simulates every token."""

    timing: GeneratorTiming
    now: float = 0.0
    version: int = -1
    running: list[list[int]] = field(default_factory=list)
    waiting: deque[list[int]] = field(default_factory=deque)
    groups: dict[int, RunningGroup[int]] = field(default_factory=dict)
    left: Counter[int] = field(default_factory=Counter)
    ends: dict[int, float] = field(default_factory=dict)

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
            self.left[rollout[0]] -= 1
            if not self.left[rollout[0]]:
                done.append(rollout[0])
        self.ends |= dict.fromkeys(done, self.now)
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
    """An event without lengths is a new version. No version arrives exactly at the end of a
    step."""
    engine: SimulatedEngine[int] = SimulatedEngine(timing)
    slow, ends, found = TokenByTokenEngine(timing), {}, {}
    for i, (place, lengths) in enumerate(sorted(events)):
        time = 0.37 * place + 0.001237 * i
        while engine.next_event_s <= time:
            now = engine.next_event_s
            for group in engine.advance_to(now):
                ends[group.key], found[group.key] = now, group.tokens_by_version
        while slow.running and slow.now < time:
            slow.make_step()
        slow.now = max(slow.now, time)
        if lengths:
            engine.add_group(i, 4, lengths, time)
            slow.groups[i] = RunningGroup(i, ConcurrencyLimit(0), 0)
            slow.left[i] = len(lengths)
            slow.waiting.extend([i, 4, tokens] for tokens in lengths)
            slow.fill()
        else:
            engine.load_version(i, 0.25, time)
            slow.version = i
            slow.now += 0.25
    while engine.next_event_s < math.inf:
        now = engine.next_event_s
        for group in engine.advance_to(now):
            ends[group.key], found[group.key] = now, group.tokens_by_version
    while slow.running:
        slow.make_step()
    assert ends == pytest.approx(slow.ends)
    assert found == {key: group.tokens_by_version for key, group in slow.groups.items()}
    assert engine.is_empty and not slow.waiting


def test_a_new_version_recomputes_the_kv_cache_unless_kept():
    ends: dict[float, float] = {}
    for recompute_token_s in (0.0, 0.1):
        timing = GeneratorTiming(1, 8, 1e6, 0, 0, 0, 1.0, 0, 0, recompute_token_s=recompute_token_s)
        engine: SimulatedEngine[str] = SimulatedEngine(timing)
        engine.add_group("a", 5, [4], 0.0)
        # By then two tokens follow a prompt of five.
        assert engine.load_version(1, 0.5, 2.0) == 2.5
        ends[recompute_token_s] = engine.next_event_s
    assert ends[0.0] == 4.5
    assert ends[0.1] == 4.5 + 7 * 0.1


@given(
    groups=st.integers(1, 6),
    size=st.integers(1, 4),
    prompt=st.integers(1, 9),
    tokens=st.integers(1, 12),
    places=st.integers(1, 20),
    spare=st.integers(1, 60),
)
def test_the_planners_batching_matches_the_engine(
    groups: int, size: int, prompt: int, tokens: int, places: int, spare: int
):
    room = float(prompt + tokens + 1 + spare)
    timing = replace(PLAIN, max_running=places, kv_tokens=room)
    workload = Workload(groups, size, prompt, FixedLength(tokens))
    (share,) = GenerationModel(workload).find_replica_schedules(timing)
    # The planner treats KV caches of similar size alike.
    same = (1 + CAPACITY_TOLERANCE) ** math.floor(math.log(room) / math.log(1 + CAPACITY_TOLERANCE))
    ends = []
    for kept in (room, same):
        engine: SimulatedEngine[str] = SimulatedEngine(replace(timing, kv_tokens=kept))
        for i in range(groups):
            engine.add_group(f"{i}", prompt, [tokens] * size, 0.0)
        end_times = run(engine)
        ends.append([end_times[f"{i}"] for i in range(groups)])
    assert share.group_ends.tolist() in ends
