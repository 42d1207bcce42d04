"""Groups and turns that the generators of a run sampled, from the spans of its trace.

A span is that of a whole group, or, in a run with an environment, of a turn of an episode.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from streamrl.planner.problem.workload import EpisodeWork, TurnWork
from streamrl.telemetry.spans import Span

Admissions = Mapping[str, tuple[float, int]]
"""Time of admission and version, by uid."""


@dataclass(frozen=True)
class GeneratedGroup:
    """A group of a finished run, or a turn of it: when it was sampled, and the tokens.

    intervals: start and end of sampling; several if sampling was paused. Those of a group of
        episodes include the time of their environment.
    prompt_tokens: tokens before the first sampled token.
    lengths: sampled tokens of each rollout.
    admitted_s, admitted_version: time of admission, and the oldest version that may sample the
        group.
    cached_tokens: prompt tokens in the prefix cache.
    reset_s: seconds of the environment before the first turn.
    """

    process: str
    stage: str
    uid: str
    intervals: tuple[tuple[float, float], ...]
    prompt_tokens: int
    lengths: tuple[int, ...]
    admitted_s: float
    admitted_version: int
    cached_tokens: int = 0
    reset_s: float = 0.0

    @property
    def start_s(self) -> float:
        return self.intervals[0][0]

    @property
    def end_s(self) -> float:
        return self.intervals[-1][1]


Work = TypeVar("Work", GeneratedGroup, Span)


def split_gaps(works: Iterable[Work]) -> Iterator[list[Work]]:
    """Yield the works of a process, ordered by start, between moments at which it had none."""
    overlapping: list[Work] = []
    end_s = float("-inf")
    for work in works:
        if overlapping and work.start_s >= end_s:
            yield overlapping
            overlapping = []
        overlapping.append(work)
        end_s = max(end_s, work.end_s)
    if overlapping:
        yield overlapping


def collect_groups(
    spans: Sequence[Span], admitted: Admissions, *, since: float
) -> list[GeneratedGroup]:
    """Return the completely sampled groups that begin at `since` or later, by begin."""
    intervals_by_group: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    groups = []
    for span in sorted(spans, key=lambda span: span.end_s):
        uid = span.args.get("uid")
        if uid is None or "prompt" not in span.args:
            continue
        intervals = intervals_by_group[span.process, span.name, str(uid)]
        intervals.append((span.start_s, span.end_s))
        lengths = span.args.get("lengths")
        if lengths and intervals[0][0] >= since:
            groups.append(
                GeneratedGroup(
                    span.process,
                    span.name,
                    str(uid),
                    tuple(intervals),
                    int(span.args["prompt"]),
                    tuple(int(tokens) for tokens in str(lengths).split()),
                    *admitted.get(str(uid), (intervals[0][0], 0)),
                )
            )
    return sorted(groups, key=lambda group: group.start_s)


@dataclass(frozen=True)
class SampledTurn:
    """Turn of an episode in a trace.

    episode: number of the episode within its group.
    context: tokens before the turn. tokens: sampled tokens.
    environment_s: seconds that the environment took in the episode so far.
    """

    process: str
    stage: str
    uid: str
    episode: int
    turn: int
    intervals: tuple[tuple[float, float], ...]
    context: int
    tokens: int
    environment_s: float

    @property
    def start_s(self) -> float:
        return self.intervals[0][0]

    @property
    def end_s(self) -> float:
        return self.intervals[-1][1]

    def to_group(self, admitted: Admissions, *, cached_tokens: int) -> GeneratedGroup:
        """Return the turn as a group of one rollout."""
        return GeneratedGroup(
            self.process,
            self.stage,
            self.uid,
            self.intervals,
            self.context,
            (self.tokens,),
            *admitted.get(self.uid, (self.start_s, 0)),
            cached_tokens,
        )


@dataclass(frozen=True)
class RecordedEpisodes:
    """Episodes of a run by group, each as its turns in order.

    final_s: mean seconds of the environment after the last turn.
    """

    groups: Sequence[Sequence[Sequence[SampledTurn]]]
    final_s: float

    @classmethod
    def from_turns(
        cls,
        turns: Sequence[SampledTurn],
        *,
        ended: Collection[str],
        group_size: int,
        environment_s: float,
    ) -> "RecordedEpisodes":
        """Collect the whole groups among turns.

        ended: uids of the groups that ended. environment_s: mean seconds of the environment in an
            episode, from its reset to its score.
        """
        by_uid: dict[str, list[Sequence[SampledTurn]]] = defaultdict(list)
        for (_, uid, _), episode in split_episodes(turns).items():
            if uid in ended and episode[0].turn == 0:
                by_uid[uid].append(episode)
        groups = [episodes for episodes in by_uid.values() if len(episodes) == group_size]
        last_turns = [episode[-1] for episodes in groups for episode in episodes]
        recorded_s = sum(turn.environment_s for turn in last_turns) / max(1, len(last_turns))
        return cls(groups, max(0.0, environment_s - recorded_s))

    def list_groups(self, admitted: Admissions) -> list[GeneratedGroup]:
        """Return the groups, each from its first turn until its environment is done, by begin."""
        groups = []
        for episodes in self.groups:
            first = min((episode[0] for episode in episodes), key=lambda turn: turn.start_s)
            end_s = max(episode[-1].end_s for episode in episodes) + self.final_s
            groups.append(
                GeneratedGroup(
                    first.process,
                    first.stage,
                    first.uid,
                    ((first.start_s, end_s),),
                    first.context,
                    tuple(sum(turn.tokens for turn in episode) for episode in episodes),
                    *admitted.get(first.uid, (first.start_s, 0)),
                    reset_s=first.environment_s,
                )
            )
        return sorted(groups, key=lambda group: group.start_s)

    def list_works(self) -> tuple[EpisodeWork, ...]:
        return tuple(
            EpisodeWork(tuple(_to_works(episode)), self.final_s)
            for episodes in self.groups
            for episode in episodes
        )


def _to_works(episode: Sequence[SampledTurn]) -> Iterable[TurnWork]:
    """Yield the work of each turn; what precedes the first turn is part of the prompt."""
    first = episode[0]
    yield TurnWork(first.environment_s, 0, first.tokens)
    for before, turn in pairwise(episode):
        # A context that was rewritten may be shorter than the last one.
        observed_tokens = max(0, turn.context - before.context - before.tokens)
        seconds = turn.environment_s - before.environment_s
        yield TurnWork(seconds, observed_tokens, turn.tokens)


def collect_turns(spans: Sequence[Span], *, since: float) -> list[SampledTurn]:
    """Return the completely sampled turns that begin at `since` or later, by begin."""
    intervals_by_turn: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    turns = []
    for span in sorted(spans, key=lambda span: span.end_s):
        args = span.args
        if "turn" not in args:
            continue
        key = (span.process, *(args[name] for name in ("uid", "episode", "turn")))
        intervals_by_turn[key].append((span.start_s, span.end_s))
        # Only the last part of a turn that was paused has its tokens.
        if args.get("tokens"):
            intervals = tuple(intervals_by_turn.pop(key))
            turn = SampledTurn(
                span.process,
                span.name,
                str(args["uid"]),
                int(args["episode"]),
                int(args["turn"]),
                intervals,
                int(args["context"]),
                int(args["tokens"]),
                float(args["environment_s"]),
            )
            if turn.start_s >= since:
                turns.append(turn)
    return sorted(turns, key=lambda turn: turn.start_s)


def split_episodes(
    turns: Sequence[SampledTurn],
) -> Mapping[tuple[str, str, int], Sequence[SampledTurn]]:
    """Return the turns of each episode by process, uid and number.

    Only the turns of its last attempt count.
    """
    episodes: dict[tuple[str, str, int], list[SampledTurn]] = {}
    for turn in turns:
        key = (turn.process, turn.uid, turn.episode)
        if turn.turn == 0 or key not in episodes:
            episodes[key] = []
        episodes[key].append(turn)
    return episodes


def list_turn_groups(
    turns: Sequence[SampledTurn], spans: Sequence[Span], admitted: Admissions
) -> list[GeneratedGroup]:
    """Return each turn as a group of one rollout, by begin.

    The tokens of the turn before are cached, unless its process loaded a version since.
    """
    loads_by_process: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        if span.name == "pull":
            loads_by_process[span.process].append(span.end_s)
    for loads in loads_by_process.values():
        loads.sort()
    latest: dict[tuple[str, str, int], SampledTurn] = {}
    groups = []
    for turn in turns:
        key = (turn.process, turn.uid, turn.episode)
        before, cached_tokens = latest.get(key), 0
        loads = loads_by_process[turn.process]
        if turn.turn and before is not None:
            has_loaded = bisect_right(loads, before.end_s) < bisect_right(loads, turn.start_s)
            cached_tokens = 0 if has_loaded else before.context + before.tokens
        latest[key] = turn
        groups.append(turn.to_group(admitted, cached_tokens=cached_tokens))
    return groups
