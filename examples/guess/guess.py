"""Guess a number from 0 to 63 in six turns, with an answer to each guess."""

import random
import re
from statistics import fmean

from streamrl.environments.interface import EpisodeSummary, Reply, Turn

NUMBERS = range(64)
MAX_GUESSES = 6
GUESS = re.compile(r"[0-9]{2}")


class Guess:
    """Game with a number that only the environment knows."""

    def reset(self, row: object, seed: int) -> None:
        """Draw the number: the same for all episodes of a group, which have the same seed."""
        self.number = random.Random(seed).choice(NUMBERS)
        self.left = NUMBERS
        self.num_guesses = 0
        self.is_won = False

    def step(self, reply: Reply) -> Turn:
        """Answer `<` or `>` for a number below or above the guess, and the interval that is left.

        Reward: 1 for the number itself; otherwise how evenly the guess divides the interval,
        whatever luck it has: almost 1 in the middle, 0 at the ends and outside.
        """
        self.num_guesses += 1
        is_last = self.num_guesses == MAX_GUESSES
        if not GUESS.fullmatch(reply.text):
            return Turn(f"?{format_interval(self.left)}", done=is_last)
        guess = int(reply.text)
        if guess == self.number:
            self.is_won = True
            return Turn("=", reward=1.0, done=True)
        below = range(self.left.start, min(guess, self.left.stop))
        above = range(max(guess + 1, self.left.start), self.left.stop)
        evenness = 2 * min(len(below), len(above)) / len(self.left)
        sign, self.left = ("<", below) if self.number < guess else (">", above)
        return Turn(f"{sign}{format_interval(self.left)}", reward=evenness, done=is_last)

    def state_key(self) -> str:
        """Return the interval that is left: turns that begin with the same one are comparable."""
        return format_interval(self.left)

    def score(self, episode: EpisodeSummary) -> float:
        """Return the mean reward of the turns, and 1 more for a game that is won."""
        return fmean(episode.rewards) + self.is_won


def format_interval(numbers: range) -> str:
    return f"{numbers.start:02d}-{numbers.stop - 1:02d}"
