"""Guess a number from 0 to 63 in six turns; each reply says on which side of the guess it lies."""

import random
import re
from typing import Any

from streamrl.environments.interface import Reply, Turn

NUMBERS = range(64)
MAX_GUESSES = 6


class Guess:
    """The number, and the interval in which the answers so far leave it."""

    def reset(self, row: Any, seed: int) -> None:
        self.is_won = False
        self.number = random.Random(seed).choice(NUMBERS)
        self.left = NUMBERS
        self.num_guesses = 0

    def step(self, reply: Reply) -> Turn:
        """Answer `<` if the number is smaller than the guess, `>` if larger, `?` to other text.

        Reward: the fraction of the interval that the answer excludes; 1 for the number itself.
        """
        self.num_guesses += 1
        if not re.fullmatch(r"[0-9]{1,2}", reply.text):
            return Turn("?", done=self.num_guesses == MAX_GUESSES)
        guess = int(reply.text)
        if guess == self.number:
            self.is_won = True
            return Turn("=", reward=1.0, done=True)
        size = len(self.left)
        if self.number < guess:
            answer, self.left = "<", range(self.left.start, min(guess, self.left.stop))
        else:
            answer, self.left = ">", range(max(guess + 1, self.left.start), self.left.stop)
        excluded = 1 - len(self.left) / size
        answer += f"{self.left.start:02d}-{self.left.stop - 1:02d}"
        return Turn(answer, reward=excluded, done=self.num_guesses == MAX_GUESSES)
