"""Asyncio client of the vLLM engine: requests, partial rollouts, pause and resume."""
