"""How many parameters a device holds: the fullest stage's share of every tensor, exactly."""

from functools import cache

from streamrl.placement.shapes import ModelShape
from streamrl.resharding import ModelSpec
from streamrl.resharding.tensors import even_stages


@cache
def spec_of(shape: ModelShape, itemsize: int) -> ModelSpec:
    """The tensors of a shape, made once."""
    return shape.tensors(itemsize)


@cache
def stage_params(shape: ModelShape, stages: int, tensor: int) -> tuple[int, ...]:
    """Parameters on each tensor-parallel rank, stage by stage.

    What does not split, as a router, is on all ranks whole; so are keys' and values' heads where
    there are fewer than ranks. Raises ValueError where something does not divide.
    """
    spec = spec_of(shape, 1)
    stage_of: list[int] = []
    for stage, count in enumerate(even_stages(spec.num_places, stages)):
        stage_of += [stage] * count
    held = [0] * stages
    sizes: dict[object, int] = {}
    for each in spec.tensors:
        cut = (each.shape, each.split_dim, each.components)
        if cut not in sizes:
            sizes[cut] = max(
                sum(box.numel for box in each.part(index, tensor)) for index in range(tensor)
            )
        for stage in {stage_of[place] for place in each.places}:
            held[stage] += sizes[cut]
    return tuple(held)


def fullest_stage(shape: ModelShape, stages: int, tensor: int) -> int:
    """Parameters of the rank that has most. Raises ValueError likewise."""
    return max(stage_params(shape, stages, tensor))
