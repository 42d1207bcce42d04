"""Run vLLM 0.32: engine and its thread, executors, weight loading and KV cache."""
