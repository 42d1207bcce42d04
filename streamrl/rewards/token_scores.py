"""Scores by token: each part of a score falls on the turn, token or span that a reward names."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from streamrl.errors import RewardError
from streamrl.messages import SCORE_TOLERANCE, Array
from streamrl.rewards.interface.completion import CONVERSATION, LAST_TURN, Completion
from streamrl.user_code.reward_result import RewardResult

PieceFunction = Callable[[Array], Sequence[int]]
"""Returns the number of characters that each token id adds to a text without special tokens."""
MAX_SCORE = float(np.finfo(np.float32).max)
TURN_SEPARATOR_CHARS = 1
"""Newline between turns in the text of all turns, see `Completion.get_part`."""


def check_places(result: RewardResult, completion: Completion, part: str) -> None:
    """Raise RewardError if the turns, tokens or spans of a result do not fit the completion."""
    ids = completion.get_part_ids(part)
    for noun, given, count in (
        ("turns", result.turn_scores, len(completion.turns)),
        ("tokens", result.token_scores, None if ids is None else len(ids)),
    ):
        if given and len(given) != count:
            there_are = "a text alone has none" if count is None else f"there are {count}"
            raise RewardError(f"has scores of {len(given)} {noun}, {there_are}")
    if result.span_scores and part == CONVERSATION:
        raise RewardError(f"has scores of spans, for which set of=sampled, not of={part}")
    text_length = len(completion.get_part(part)) if result.span_scores else 0
    for start, end, _ in result.span_scores:
        if not 0 <= start < end <= text_length:
            raise RewardError(
                f"has a score of characters {start} to {end}, the text has {text_length}"
            )
    numbers = [*result.turn_scores, *result.token_scores, *(x for *_, x in result.span_scores)]
    if not sum(map(abs, numbers)) <= MAX_SCORE:
        raise RewardError("has scores of parts that overflow a float32")


def place_score(
    result: RewardResult, completion: Completion, part: str, measure_pieces: PieceFunction
) -> Array:
    """Return the score of a result by sampled token of the whole completion, float64 [N].

    The score of a turn falls on its last token, that of a span on the token that ends it, and the
    rest of the score on the last token. The result must pass `check_places`.
    """
    lengths = [len(ids) for ids in completion.turn_ids]
    scores = np.zeros(sum(lengths))
    own = scores[-lengths[-1] :] if part == LAST_TURN else scores
    if result.turn_scores:
        scores[np.cumsum(lengths) - 1] += result.turn_scores
    if result.token_scores:
        own += result.token_scores
    if result.span_scores:
        own += _place_spans(result, completion, part, measure_pieces)
    rest = result.score - scores.sum()
    # No rounding errors of sums: a score of exactly 0 is one that did not fall here.
    scores[-1] += rest if abs(rest) > SCORE_TOLERANCE * (1 + abs(result.score)) else 0.0
    return scores


def _place_spans(
    result: RewardResult, completion: Completion, part: str, measure_pieces: PieceFunction
) -> Array:
    """Return the scores of spans of characters by token of the part, float64 [N]."""
    turns = completion.get_part_turns(part)
    # The end of each token in the text; the first token of a turn includes the separator before.
    pieces = [np.array(measure_pieces(ids), np.int64) for ids in turns]
    for later in pieces[1:]:
        later[:1] += TURN_SEPARATOR_CHARS
    ends = np.cumsum(np.concatenate(pieces))
    scores = np.zeros(len(ends))
    for _, end, score in result.span_scores:
        scores[min(int(np.searchsorted(ends, end)), len(ends) - 1)] += score
    return scores


def place_group_scores(
    results: Mapping[str, Sequence[RewardResult]],
    weights: Mapping[str, tuple[float, str]],
    passes_gates: Array,
    completions: Sequence[Completion],
    measure_pieces: PieceFunction,
) -> Array:
    """Return the combined score of a group by sampled token, float64 [tokens of all completions].

    `results` by component; `weights`: weight and part by component; `passes_gates` bool [G].
    """
    totals = [np.zeros(sum(map(len, completion.turn_ids))) for completion in completions]
    for name, (weight, part) in weights.items():
        for i, result in enumerate(results[name]):
            if passes_gates[i] and not result.is_not_judged:
                totals[i] += weight * place_score(result, completions[i], part, measure_pieces)
    return np.concatenate(totals)
