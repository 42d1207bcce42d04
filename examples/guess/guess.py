"""Guess a number from 0 to 63 in six turns, with an answer to each guess."""

import random
import re

from streamrl.environments.interface import Reply, Turn

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

        Reward: a sixth of how evenly the guess divides the interval, whatever luck it has: almost 1
        in the middle, 0 at the ends and outside. The number itself has reward 1, and a sixth for
        this turn and each that is left. The score of a game is the sum.
        """
        self.num_guesses += 1
        is_last = self.num_guesses == MAX_GUESSES
        if not GUESS.fullmatch(reply.text):
            return Turn(f"?{format_interval(self.left)}", done=is_last)
        guess = int(reply.text)
        if guess == self.number:
            self.is_won = True
            num_left = MAX_GUESSES - self.num_guesses + 1
            return Turn("=", reward=1 + num_left / MAX_GUESSES, done=True)
        below = range(self.left.start, min(guess, self.left.stop))
        above = range(max(guess + 1, self.left.start), self.left.stop)
        evenness = 2 * min(len(below), len(above)) / len(self.left)
        sign, self.left = ("<", below) if self.number < guess else (">", above)
        reward = evenness / MAX_GUESSES
        return Turn(f"{sign}{format_interval(self.left)}", reward=reward, done=is_last)

    def state_key(self) -> str:
        """Return the interval that is left: turns that begin with the same one are comparable."""
        return format_interval(self.left)


def format_interval(numbers: range) -> str:
    return f"{numbers.start:02d}-{numbers.stop - 1:02d}"
