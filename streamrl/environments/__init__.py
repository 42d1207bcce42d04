"""Environments: what an episode of several turns meets between the turns of the policy."""

from streamrl.environments.interface import Turn

__all__ = ["Turn"]
