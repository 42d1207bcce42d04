"""Demonstrations of the base model: guesses anywhere in the interval that is left."""

import random
from functools import partial

from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.guess.guess import GUESS, MAX_GUESSES, Guess
from examples.toy_models.base_model import Conversation, TurnLessons
from examples.toy_models.episodes import PlayedEpisode, play_episodes
from examples.toy_models.rows import Row
from examples.toy_models.training import TrainingRecipe
from streamrl.environments.interface import Reply

RECIPE = TrainingRecipe(num_steps=1000, hidden_size=64, lr=1.5e-2, bar={"sensible": 0.985})
MAX_NEW_TOKENS = 3


def demonstrate(row: Row, rng: random.Random, _slip_rate: float = 0.0) -> Conversation:
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


def measure_model(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, splits: dict[str, list[Row]]
) -> dict[str, float]:
    """Return the fraction of games won, and how many guesses a game takes on average.

    "sensible" is the fraction of guesses that lie in the interval that is left.
    """
    rows = splits["eval"]
    games = [Guess() for _ in rows]
    episodes = []
    for seed, (game, row) in enumerate(zip(games, rows, strict=True)):
        game.reset(row, seed=seed)
        episodes.append(PlayedEpisode(list(row["prompt"]), partial(answer_guess, game)))
    play_episodes(model, tokenizer, episodes, max_turns=MAX_GUESSES, max_new_tokens=MAX_NEW_TOKENS)
    sensible = [
        is_sensible(interval["content"], reply["content"])
        for episode in episodes
        for interval, reply in zip(episode.messages[::2], episode.messages[1::2], strict=False)
    ]
    return {
        "sensible": sum(sensible) / len(sensible),
        "won": sum(game.is_won for game in games) / len(rows),
        "guesses": sum(len(episode.replies) for episode in episodes) / len(rows),
    }


def is_sensible(observation: str, guess: str) -> bool:
    """Return whether a guess lies in the interval at the end of the environment's message."""
    first, last = observation[-5:].split("-")
    return bool(GUESS.fullmatch(guess)) and first <= guess <= last


def answer_guess(game: Guess, reply: str) -> dict[str, str] | None:
    """Return the environment's message after a reply; None if the game is over."""
    turn = game.step(Reply(reply))
    return None if turn.done else {"role": "user", "content": str(turn.observation)}


LESSONS = TurnLessons(demonstrate, measure_model)
