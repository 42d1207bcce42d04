"""Recorded groups written by hand."""

from collections.abc import Sequence
from typing import Any

from streamrl.telemetry.rollout_log import RecordedGroup, RecordedRollout, RecordedTurn


def make_guess(guess: str, *, score: float, answer: str = "higher") -> RecordedRollout:
    """Make a rollout of two turns, of which versions 3 and 4 sampled a token of the second."""
    return RecordedRollout(
        completion=f"{guess}\n{answer}\n77",
        score=score,
        components={"env": score, "judge": None},
        verdicts={"env": "pass" if score else "wrong"},
        finish_reason="stop",
        environment_score=score,
        turns=(
            RecordedTurn("prompt", "<user>Guess.", 3),
            RecordedTurn(
                "sampled",
                guess,
                2,
                reward=0.0,
                outcome="called",
                versions=((3, 2),),
                piece_lengths=(len(guess), 0),
                logprobs=(-0.5, None),
            ),
            RecordedTurn("scaffold", "<end><user>", 2),
            RecordedTurn("observation", answer, 1),
            RecordedTurn(
                "sampled",
                "77",
                2,
                reward=score,
                outcome="spoke",
                versions=((3, 1), (4, 1)),
                piece_lengths=(1, 1),
                logprobs=(-0.1, -2.0),
            ),
        ),
    )


def make_group(
    rollouts: Sequence[RecordedRollout], *, step: int = 4, uid: str = "0:1:0", **fields: Any
) -> RecordedGroup:
    prompt = ({"role": "user", "content": "Guess."},)
    return RecordedGroup(step, uid, tuple(rollouts), prompt, **fields)
