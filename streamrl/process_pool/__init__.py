"""Pools of worker processes for code that may hang, crash or leak memory."""

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
