"""Options of a run that affect its speed, besides the placement."""

from dataclasses import dataclass

from streamrl.placement.config import DEFAULT_SLICE_S


@dataclass(frozen=True)
class RunOptions:
    """Settings of several sections of a run's config.

    They are pipeline.depth, pipeline.on_stale, placement.slice_s, weights.publish_every,
    reference.every (of an EMA reference) and filter.oversample (None for auto).

    A plan replaces `depth` by its staleness bound.
    """

    depth: int | None = None
    on_stale: str = "wait"
    slice_s: float = DEFAULT_SLICE_S
    publish_every: int = 1
    reference_every: int = 1
    oversample: float | None = 1.0

    def max_steps_ahead(self, max_staleness: int) -> int:
        return max_staleness if self.depth is None else self.depth

    def round_to_publish_every(self, steps: int) -> int:
        """Round down to a multiple of publish_every.

        Every age of a version is then equally frequent among the steps.
        """
        return steps - steps % self.publish_every
