"""The memory of an engine's keys and values, which others may have while it computes nothing."""

from typing import Any

import torch

from streamrl.engines.memory.peak_memory import give_back_freed

#: vLLM's LLMEngine.
Engine = Any
#: vLLM's worker, in the process of a rank.
Worker = Any

KV_CACHE = "kv_cache"
"""What vLLM calls this memory where it sleeps."""


class KvMemory:
    """Released and had again, on every rank; belongs to the engine's thread.

    On a GPU vLLM does it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sleeps: bool = engine.vllm_config.model_config.enable_sleep_mode
        self._is_released = False

    def release(self) -> None:
        """Give it back to the system. What runs is prefilled anew once it goes on."""
        if self._is_released:
            return
        self._is_released = True
        self._engine.reset_prefix_cache(reset_running_requests=True)
        if self._sleeps:
            self._engine.model_executor.discard((KV_CACHE,))
        else:
            self._engine.collective_rpc(release_caches)

    def restore(self) -> None:
        """Have it again, empty; nothing if it was not released."""
        if not self._is_released:
            return
        self._is_released = False
        if self._sleeps:
            self._engine.model_executor.wake_up([KV_CACHE])
        else:
            self._engine.collective_rpc(restore_caches)


def release_caches(worker: Worker) -> None:
    """In a rank's process: give the memory back, if it is there."""
    for storage in _storages(worker):
        storage.resize_(0)
    give_back_freed()


def restore_caches(worker: Worker) -> None:
    """In a rank's process: have it again."""
    for storage, num_bytes in _storages(worker).items():
        storage.resize_(num_bytes)
        # What comes from the allocator may be no number.
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _storages(worker: Worker) -> dict[torch.UntypedStorage, int]:
    """Each once, with the bytes that the caches in it take."""
    found: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for cache in worker.model_runner.kv_caches:
        storage = cache.untyped_storage()
        steps = zip(cache.shape, cache.stride(), strict=True)
        last = cache.storage_offset() + sum((size - 1) * by for size, by in steps)
        _, before = found.get(storage._cdata, (storage, 0))
        found[storage._cdata] = storage, max(before, (last + 1) * cache.itemsize)
    return dict(found.values())
