"""How a run is done, beside its placement."""

from dataclasses import dataclass

from streamrl.placement.config import SLICE_S


@dataclass(frozen=True)
class Manner:
    """As in a run's config: pipeline.depth and pipeline.on_stale, placement.slice_s.

    A plan chooses the depth itself, as the bound of staleness.
    """

    depth: int | None = None
    on_stale: str = "wait"
    slice_s: float = SLICE_S
