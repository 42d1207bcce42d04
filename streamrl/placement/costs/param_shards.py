"""How many parameters a device holds: the fullest stage's share of every tensor, exactly."""

from functools import cache

from streamrl.placement.model_shapes import ModelShape
from streamrl.resharding import ModelSpec, TensorSpec
from streamrl.resharding.tensor_specs import split_stages_evenly


@cache
def build_model_spec(shape: ModelShape, itemsize: int) -> ModelSpec:
    """The tensors of a shape, made once."""
    return shape.to_model_spec(itemsize)


@cache
def stage_params(shape: ModelShape, stages: int, tensor: int, expert: int = 1) -> tuple[int, ...]:
    """Parameters on each tensor-parallel rank, stage by stage.

    What does not split, as a router, is on all ranks whole; so are keys' and values' heads where
    there are fewer than ranks. Of experts a rank holds some whole, where `expert` ranks share them
    out. Raises ValueError where something does not divide.
    """
    if expert > 1 and (not shape.experts or shape.experts % expert):
        raise ValueError(f"{shape.experts} experts over {expert} expert ranks")
    spec = build_model_spec(shape, 1)
    stage_of: list[int] = []
    for stage, count in enumerate(split_stages_evenly(spec.num_pipeline_positions, stages)):
        stage_of += [stage] * count
    held = [0] * stages
    sizes: dict[object, int] = {}
    for each in spec.tensors:
        cut = (each.shape, each.split_dim, each.components)
        if cut not in sizes:
            sizes[cut] = _max_rank_elements(each, shape, tensor, expert)
        for stage in {stage_of[place] for place in each.pipeline_positions}:
            held[stage] += sizes[cut]
    return tuple(held)


def max_stage_params(shape: ModelShape, stages: int, tensor: int, expert: int = 1) -> int:
    """Parameters of the rank that has most. Raises ValueError likewise."""
    return max(stage_params(shape, stages, tensor, expert))


def _max_rank_elements(each: TensorSpec, shape: ModelShape, tensor: int, expert: int) -> int:
    """Elements of a tensor on the rank that has most."""
    if expert > 1 and is_expert_tensor(each, shape):
        one = each.numel // (shape.experts + shape.shared_experts)
        routed = one * shape.experts // expert
        if not shape.shared_experts:
            return routed
        return routed + _max_split_elements(each, tensor) * shape.shared_experts // each.shape[0]
    return _max_split_elements(each, tensor)


def _max_split_elements(each: TensorSpec, tensor: int) -> int:
    return max(
        sum(box.numel for box in each.split_tensor(index, tensor)) for index in range(tensor)
    )


def is_expert_tensor(each: TensorSpec, shape: ModelShape) -> bool:
    """Whether a tensor is of all experts of a layer."""
    return (
        bool(shape.experts)
        and each.shape[:1] == (shape.experts + shape.shared_experts,)
        and each.split_dim is not None
    )
