"""Workers: processes that run what may hang, crash or leak, and that can be killed whole."""

from streamrl.process_pool.pool import (
    WorkerCrashError,
    WorkerError,
    WorkerMemoryError,
    WorkerPool,
    WorkerPoolSettings,
    WorkerTimeoutError,
)

__all__ = [
    "WorkerCrashError",
    "WorkerError",
    "WorkerMemoryError",
    "WorkerPool",
    "WorkerPoolSettings",
    "WorkerTimeoutError",
]
