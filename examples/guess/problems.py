"""Rows of the game: all have the same prompt, because the number comes from the episode's seed."""

from examples.guess.guess import NUMBERS, format_interval
from examples.toy_models.rows import Row, make_row

NUM_TRAIN = 4096
NUM_EVAL = 256
QUESTION = format_interval(NUMBERS)


def make_rows(*, num_eval: int = NUM_EVAL) -> dict[str, list[Row]]:
    """Return the rows by split."""
    return {
        name: [
            make_row(QUESTION, "", data_source="guess", ability="search", split=name, index=i)
            for i in range(num_rows)
        ]
        for name, num_rows in (("train", NUM_TRAIN), ("eval", num_eval))
    }
