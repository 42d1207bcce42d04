"""Evaluation of the policy on held-out prompts. Depends on neither Ray nor an engine."""
