"""Pools of worker processes for code that may hang, crash or leak memory."""
