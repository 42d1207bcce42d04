"""Exact parameter counts per device, summed over the device's shards of all tensors."""

from functools import cache

from streamrl.engines.models.model_shapes import ModelShape
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec, split_stages_evenly


@cache
def build_model_spec(shape: ModelShape, itemsize: int) -> ModelSpec:
    return shape.to_model_spec(itemsize)


@cache
def count_stage_params(
    shape: ModelShape, stages: int, tensor: int, expert: int = 1
) -> tuple[int, ...]:
    """Return the parameters of a tensor-parallel rank in each pipeline stage.

    stages, tensor, expert: number of pipeline stages, of tensor-parallel and of expert-parallel
      ranks.
    Every rank holds unsplit tensors, such as routers, and repeated KV heads if there are fewer
    heads than ranks. With `expert` > 1 a rank holds whole experts instead of slices. Raise
    ValueError if a dimension does not divide.
    """
    if expert > 1 and (not shape.experts or shape.experts % expert):
        raise ValueError(f"{shape.experts} experts over {expert} expert ranks")
    spec = build_model_spec(shape, 1)
    stage_of: list[int] = []
    for stage, count in enumerate(split_stages_evenly(spec.num_pipeline_positions, stages)):
        stage_of += [stage] * count
    params = [0] * stages
    sizes: dict[object, int] = {}
    for tensor_spec in spec.tensors:
        cut = (tensor_spec.shape, tensor_spec.split_dim, tensor_spec.components)
        if cut not in sizes:
            sizes[cut] = _find_max_rank_elements(tensor_spec, shape, tensor, expert)
        for stage in {stage_of[position] for position in tensor_spec.pipeline_positions}:
            params[stage] += sizes[cut]
    return tuple(params)


def find_max_stage_params(shape: ModelShape, stages: int, tensor: int, expert: int = 1) -> int:
    """Return the parameters of a tensor-parallel rank in the largest pipeline stage.

    Raise ValueError if a dimension of the model does not divide.
    """
    return max(count_stage_params(shape, stages, tensor, expert))


def _find_max_rank_elements(spec: TensorSpec, shape: ModelShape, tensor: int, expert: int) -> int:
    if expert > 1 and is_expert_tensor(spec, shape):
        expert_elements = spec.numel // (shape.experts + shape.shared_experts)
        routed = expert_elements * shape.experts // expert
        if not shape.shared_experts:
            return routed
        return (
            routed + _find_max_split_elements(spec, tensor) * shape.shared_experts // spec.shape[0]
        )
    return _find_max_split_elements(spec, tensor)


def _find_max_split_elements(spec: TensorSpec, tensor: int) -> int:
    return max(
        sum(box.numel for box in spec.split_tensor(index, tensor)) for index in range(tensor)
    )


def is_expert_tensor(spec: TensorSpec, shape: ModelShape) -> bool:
    """Return whether a tensor stacks the weights of all experts of a layer."""
    return (
        bool(shape.experts)
        and spec.shape[:1] == (shape.experts + shape.shared_experts,)
        and spec.split_dim is not None
    )
