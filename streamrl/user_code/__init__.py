"""Processes that run code of others: rewards, environments, sandboxed programs."""
