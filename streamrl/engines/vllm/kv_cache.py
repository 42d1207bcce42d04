"""The memory of an engine's keys and values, which others may have while it computes nothing."""

from typing import Any

import torch

from streamrl.engines.memory.peak_memory import release_freed_memory

#: vLLM's LLMEngine.
VllmEngine = Any
#: vLLM's worker, in the process of a rank.
VllmWorker = Any

KV_CACHE_TAG = "kv_cache"
"""What vLLM calls this memory where it sleeps."""


class KvCacheMemory:
    """Released and had again, on every rank; belongs to the engine's thread.

    On a GPU vLLM does it.
    """

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._has_sleep_mode: bool = engine.vllm_config.model_config.enable_sleep_mode
        self._is_asleep = False

    def sleep(self) -> None:
        """Give it back to the system. What runs is prefilled anew once it goes on."""
        if self._is_asleep:
            return
        self._is_asleep = True
        self._engine.reset_prefix_cache(reset_running_requests=True)
        if self._has_sleep_mode:
            self._engine.model_executor.discard((KV_CACHE_TAG,))
        else:
            self._engine.collective_rpc(free_kv_caches)

    def wake_up(self) -> None:
        """Have it again, empty; nothing if it was not released."""
        if not self._is_asleep:
            return
        self._is_asleep = False
        if self._has_sleep_mode:
            self._engine.model_executor.wake_up([KV_CACHE_TAG])
        else:
            self._engine.collective_rpc(allocate_kv_caches)


def free_kv_caches(worker: VllmWorker) -> None:
    """In a rank's process: give the memory back, if it is there."""
    for storage in _list_cache_storages(worker):
        storage.resize_(0)
    release_freed_memory()


def allocate_kv_caches(worker: VllmWorker) -> None:
    """In a rank's process: have it again."""
    for storage, num_bytes in _list_cache_storages(worker).items():
        storage.resize_(num_bytes)
        # What comes from the allocator may be no number.
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _list_cache_storages(worker: VllmWorker) -> dict[torch.UntypedStorage, int]:
    """Each once, with the bytes that the caches in it take."""
    found: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for cache in worker.model_runner.kv_caches:
        storage = cache.untyped_storage()
        steps = zip(cache.shape, cache.stride(), strict=True)
        last = cache.storage_offset() + sum((size - 1) * by for size, by in steps)
        _, before = found.get(storage._cdata, (storage, 0))
        found[storage._cdata] = storage, max(before, (last + 1) * cache.itemsize)
    return dict(found.values())
