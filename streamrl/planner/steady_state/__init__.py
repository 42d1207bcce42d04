"""Steady-state estimate: predicts the time of a training step from a placement's schedule."""
