"""Options of a run that affect its speed, besides the placement."""

from dataclasses import dataclass

from streamrl.placement.config import DEFAULT_SLICE_S


@dataclass(frozen=True)
class RunOptions:
    """Settings of a run's config that affect its speed.

    They are pipeline.depth, pipeline.on_stale, placement.slice_s, weights.publish_every,
    reference.every (of an EMA reference), filter.oversample (None for auto) and
    environment.open_episodes (None for as many as a generator samples at a time).

    The planner replaces `depth` by the staleness bound of the placement that it evaluates.
    """

    depth: int | None = None
    on_stale: str = "wait"
    slice_s: float = DEFAULT_SLICE_S
    publish_every: int = 1
    reference_every: int = 1
    oversample: float | None = 1.0
    open_episodes: int | None = None

    def get_max_steps_ahead(self, max_staleness: int) -> int:
        return max_staleness if self.depth is None else self.depth

    def round_to_publish_every(self, steps: int) -> int:
        """Round a number of training steps down to a multiple of weights.publish_every.

        Over such a number of steps, generators use each published version equally long, so means
        over the steps are not biased.
        """
        return steps - steps % self.publish_every
