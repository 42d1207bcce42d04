"""vLLM's own checks of engine arguments as on a GPU, in a process without one.

    python -m tests.engines.vllm.stub_gpu < cases.json

The GPU and CPU builds of vLLM share their Python code, so a stub platform and empty modules in
place of compiled kernels suffice to build vLLM's config. Each case is a JSON object: `model`,
`generator` (settings), `max_length`. The output is a JSON list with an object per case: the facts
of vLLM's config, or `error`.
"""

import json
import os
import sys
from types import ModuleType
from typing import Any

from streamrl.engines.generator_config import GeneratorConfig, make_engine_args
from streamrl.engines.vllm.environment import make_vllm_env

KERNEL_MODULES = ("_C_stable_libtorch", "_moe_C_stable_libtorch")
CAPABILITY = (9, 0)
GPU_BYTES = 80 << 30
GPUS_PER_NODE = 8


def install_platform() -> None:
    """Make vLLM believe in eight H100; call before anything asks for the platform."""
    import torch

    for name in KERNEL_MODULES:
        sys.modules.setdefault(f"vllm.{name}", ModuleType(name))
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: GPUS_PER_NODE
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class StubPlatform(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*CAPABILITY)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return GPU_BYTES

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

        def is_sleep_mode_available(self) -> bool:
            return True

        def is_cumem_allocator_available(self) -> bool:
            return True

    platforms.current_platform = platforms._current_platform = StubPlatform()
    import vllm.config.vllm
    from vllm.model_executor.models import registry

    # To save what it found out about a model's class, vLLM imports kernels.
    registry._LazyRegisteredModel._save_modelinfo_to_cache = lambda *_: None
    # The CPU build comes without Triton, on which the choice of the model runner depends.
    vllm.config.vllm.HAS_TRITON = True


def check_case(model: str, generator: dict[str, Any], max_length: int) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs

    config = GeneratorConfig(**generator)
    arguments = make_engine_args(model, config, seed=0, max_length=max_length, on_cpu=False)
    try:
        built = EngineArgs(**arguments).create_engine_config()
    except (ValueError, AssertionError, NotImplementedError, RuntimeError) as error:
        return {"error": " ".join(str(error).split())}
    sizes = built.compilation_config.cudagraph_capture_sizes
    return {
        "v2_runner": built.use_v2_model_runner,
        "async_scheduling": built.scheduler_config.async_scheduling,
        "chunked_prefill": built.scheduler_config.enable_chunked_prefill,
        "step_tokens": built.scheduler_config.max_num_batched_tokens,
        "sequences": built.scheduler_config.max_num_seqs,
        "graph_sizes": sizes,
        "graph_mode": built.compilation_config.cudagraph_mode.name,
        "prefix_caching": built.cache_config.enable_prefix_caching,
        "dtype": str(built.model_config.dtype).removeprefix("torch."),
        "sleep_mode": built.model_config.enable_sleep_mode,
        "ranks": built.parallel_config.world_size,
    }


def main() -> None:
    os.environ.update(make_vllm_env("cuda"))
    install_platform()
    results = [check_case(**case) for case in json.load(sys.stdin)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
