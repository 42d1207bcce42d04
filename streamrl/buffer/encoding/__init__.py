"""Bytes of columns, prompts and messages between a shard and its clients."""
