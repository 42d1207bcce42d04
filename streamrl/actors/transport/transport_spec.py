"""How the weights of a run travel: the transport that was chosen, and what its ends must know."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.weights.broadcast_tree import Spread
from streamrl.weights.config import DELTA, SHARED_MEMORY, STORE
from streamrl.weights.transport_choice import Choice
from streamrl.weights.transports.shm_segments import PREFIX, SHARED_MEMORY_DIR, clear_up

END_S = 2.0
"""Longest that ended publishers are waited for, s; the next publisher clears up after others."""


@dataclass(frozen=True)
class WeightTravel:
    """Told to every actor of a run; `travel_ends` makes its ends.

    `token` tells the run from others on the machine. `room`: most bytes of shared memory for each
    role that is published. `node`: where all have to be who publish or follow; empty for anywhere.
    """

    choice: Choice
    token: str
    run_dir: Path
    keep_versions: int
    room: Mapping[str, int]
    node: str = ""

    def spread(self, origin: str) -> Spread | None:
        """Who may pull from whom, with publishers on the node `origin`.

        Where every node takes a copy of its own, some wait for others that have one.
        """
        return Spread(origin) if self.choice.transport in (STORE, DELTA) else None

    def end(self) -> None:
        """Take away what publishers that were ended have left in memory."""
        if self.choice.transport != SHARED_MEMORY:
            return
        deadline = time.monotonic() + END_S
        # They may not be quite gone: until then what they hold is theirs.
        while any(SHARED_MEMORY_DIR.glob(f"{PREFIX}{self.token}*")):
            clear_up()
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
