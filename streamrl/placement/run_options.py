"""How a run is done, beside its placement."""

from dataclasses import dataclass

from streamrl.placement.config import DEFAULT_SLICE_S


@dataclass(frozen=True)
class RunOptions:
    """As in a run's config: pipeline.depth and pipeline.on_stale, placement.slice_s,
    weights.publish_every, of a reference that moves reference.every, and filter.oversample, which
    is null for auto.

    A plan chooses the depth itself, as the bound of staleness.
    """

    depth: int | None = None
    on_stale: str = "wait"
    slice_s: float = DEFAULT_SLICE_S
    publish_every: int = 1
    reference_every: int = 1
    oversample: float | None = 1.0

    def max_steps_ahead(self, max_staleness: int) -> int:
        """Steps that generation may be ahead of training."""
        return max_staleness if self.depth is None else self.depth

    def round_to_publish_every(self, steps: int) -> int:
        """At most so many steps, of which as many are of each age if not all have a version."""
        return steps - steps % self.publish_every
