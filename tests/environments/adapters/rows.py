"""Rows and replies for the adapters."""

import numpy as np

from streamrl.environments.interface import Reply
from streamrl.messages import Prompt


def make_row(**options):
    """Return a row with options of its own."""
    extra_info = {"environment_options": options} if options else {}
    return Prompt("0:0:0", np.zeros(1, np.int32), extra_info=extra_info)


def play(game, *texts):
    """Return the turns that answer these replies."""
    return [game.step(Reply(text)) for text in texts]
