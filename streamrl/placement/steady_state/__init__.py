"""Estimate the step time of a placement by a steady-state schedule."""
