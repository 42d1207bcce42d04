"""Demonstrations of the base model: guesses anywhere in the interval that is left."""

import random
from collections.abc import Callable

from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.guess.guess import Guess
from examples.toy_models.demonstrations import Conversation, DemonstrationRecipe
from examples.toy_models.rows import Row
from streamrl.environments.interface import Reply

RECIPE = DemonstrationRecipe()
MAX_NEW_TOKENS = 3


def demonstrate(row: Row, rng: random.Random) -> Conversation:
    """Return a game in which every guess lies in the interval that is left."""
    game = Guess()
    game.reset(row, seed=rng.randrange(2**32))
    messages = list(row["prompt"])
    while True:
        guess = f"{rng.choice(game.left):02d}"
        messages.append({"role": "assistant", "content": guess})
        turn = game.step(Reply(guess))
        if turn.done:
            return messages
        messages.append({"role": "user", "content": str(turn.observation)})


def start_game(row: Row, seed: int) -> Callable[[str], dict[str, str] | None]:
    """Return the function that answers the guesses of a new game."""
    game = Guess()
    game.reset(row, seed=seed)

    def answer_guess(reply: str) -> dict[str, str] | None:
        turn = game.step(Reply(reply))
        return None if turn.done else {"role": "user", "content": str(turn.observation)}

    return answer_guess


def measure_model(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row]
) -> dict[str, float]:
    """Return the fraction of games won, and the mean number of guesses."""
    games = [Guess() for _ in rows]
    return {}
