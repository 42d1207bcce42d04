"""The memory of an engine's keys and values, which others may have while it computes nothing."""

from collections.abc import Iterator
from typing import Any

import torch

from streamrl.engines.peak_memory import give_back_freed

#: vLLM's LLMEngine.
Engine = Any


KV_CACHE = "kv_cache"
"""What vLLM calls this memory where it sleeps."""


class KvMemory:
    """Released and had again; belongs to the engine's thread. On a GPU vLLM does it.

    Not of a split engine on a CPU, whose memory is in other processes.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sleeps: bool = engine.vllm_config.model_config.enable_sleep_mode
        self._is_released = False
        self._sizes: dict[int, int] = {}

    def release(self) -> None:
        """Give it back to the system. What runs is prefilled anew once it goes on."""
        if self._is_released:
            return
        self._is_released = True
        self._engine.reset_prefix_cache(reset_running_requests=True)
        if self._sleeps:
            self._engine.model_executor.discard((KV_CACHE,))
            return
        for index, storage in enumerate(self._storages()):
            self._sizes[index] = storage.nbytes()
            storage.resize_(0)
        give_back_freed()

    def restore(self) -> None:
        """Have it again, empty; nothing if it was not released."""
        if not self._is_released:
            return
        self._is_released = False
        if self._sleeps:
            self._engine.model_executor.wake_up([KV_CACHE])
            return
        for index, storage in enumerate(self._storages()):
            storage.resize_(self._sizes[index])
            # What comes from the allocator may be no number.
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Each once, in the same order every time."""
        seen = set()
        for cache in self._engine.model_executor.driver_worker.worker.model_runner.kv_caches:
            storage = cache.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage
