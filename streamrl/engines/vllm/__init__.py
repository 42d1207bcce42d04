"""vLLM: engine, executor, weights, KV cache."""
