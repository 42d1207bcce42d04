"""Text adventures of TextWorld, from files that `tw-make` writes."""

import re

import textworld

from streamrl.environments.interface import Reply, Turn

STATUS_LINE = re.compile(r"\s*>?[ ]{20,}[^\n]*\Z|\s*>\s*\Z")
"""End of the interpreter's output: its prompt, and a line with place, score and moves."""
COMMAND = re.compile(r"[A-Za-z0-9 ,'-]{1,120}")
"""A command; other characters may end the interpreter, or look like its marks of score and end."""
META_COMMAND = re.compile(
    r"\b(?:tw-|(?:quit|q|restart|restore|save|undo|oops|script|unscript|transcript|verbose|brief"
    r"|superbrief|version|verify|notify|restrict|enable|disable)\b)",
    re.I,
)
"""Commands to the interpreter, which write files, end it, or show what a player cannot know."""


class TextWorldGame:
    """Adventure whose turns are rewarded with their gain in score, as a share of the highest score.

    game: file .z8 with its .json beside it. The last line of a reply is the command.
    """

    def __init__(self, game: str) -> None:
        infos = textworld.EnvInfos(score=True, max_score=True, extras=["walkthrough"])
        self._game = textworld.start(game, infos)

    def reset(self, row: object, seed: int) -> str:
        self._game.seed(seed)
        state = self._game.reset()
        self._score, self._max_score = 0, state["max_score"]
        self._walkthrough = iter(state["extra.walkthrough"])
        return clean(state["feedback"])

    def step(self, reply: Reply) -> Turn:
        command = reply.text.strip().rpartition("\n")[2].strip()
        if not COMMAND.fullmatch(command) or META_COMMAND.search(command):
            return Turn("Reply with a command of the game.")
        state, score, is_over = self._game.step(command)
        gain, self._score = score - self._score, score
        return Turn(clean(state["feedback"]), gain / self._max_score, bool(is_over))

    def oracle(self, row: object, messages: object) -> str:
        """Return the next command of the game's walkthrough, for `streamrl play --check`."""
        return next(self._walkthrough, "look")

    def close(self) -> None:
        self._game.close()


def clean(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", STATUS_LINE.sub("", text).strip())
