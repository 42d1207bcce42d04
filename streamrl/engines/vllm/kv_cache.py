"""Free the KV cache of an idle engine and allocate it again, on GPUs and CPUs."""

from collections.abc import Callable
from typing import Any

import torch

from streamrl.engines.memory.peak_memory import release_freed_memory

#: vLLM's LLMEngine.
VllmEngine = Any
#: vLLM's worker, in the process of a rank.
VllmWorker = Any

KV_CACHE_TAG = "kv_cache"
"""vLLM's tag of the KV cache in sleep mode."""


class KvCacheMemory:
    """Frees and allocates the KV cache on all ranks of an engine; belongs to the engine's thread.

    On a GPU this uses vLLM's sleep mode; on a CPU, which has none, it resizes the storages.
    """

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._has_sleep_mode: bool = engine.vllm_config.model_config.enable_sleep_mode
        self._is_asleep = False

    def sleep(self) -> None:
        """Free the KV cache; running rollouts are preempted and prefilled again later."""
        if self._is_asleep:
            return
        self._is_asleep = True
        self._engine.reset_prefix_cache(reset_running_requests=True)
        if self._has_sleep_mode:
            self._engine.model_executor.discard((KV_CACHE_TAG,))
        else:
            self._engine.collective_rpc(free_kv_caches)

    def wake_up(self) -> None:
        if not self._is_asleep:
            return
        self._is_asleep = False
        if self._has_sleep_mode:
            self._engine.model_executor.wake_up([KV_CACHE_TAG])
        else:
            self._engine.collective_rpc(allocate_kv_caches)


def is_freed_after(call: str | Callable[..., Any]) -> bool | None:
    """Return whether a worker's KV cache is freed after this call of `KvCacheMemory`'s.

    None: the call is another one.
    """
    if call in ("discard", free_kv_caches):
        return True
    return False if call in ("wake_up", allocate_kv_caches) else None


def free_kv_caches(worker: VllmWorker) -> None:
    for storage in _list_cache_storages(worker):
        storage.resize_(0)
    release_freed_memory()


def allocate_kv_caches(worker: VllmWorker) -> None:
    for storage, num_bytes in _list_cache_storages(worker).items():
        storage.resize_(num_bytes)
        # Zero the memory: masked positions must not hold NaN.
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _list_cache_storages(worker: VllmWorker) -> dict[torch.UntypedStorage, int]:
    sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for cache in worker.model_runner.kv_caches:
        storage = cache.untyped_storage()
        dims = zip(cache.shape, cache.stride(), strict=True)
        last = cache.storage_offset() + sum((size - 1) * stride for size, stride in dims)
        _, num_bytes = sizes.get(storage._cdata, (storage, 0))
        sizes[storage._cdata] = storage, max(num_bytes, (last + 1) * cache.itemsize)
    return dict(sizes.values())
