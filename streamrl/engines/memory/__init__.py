"""Measure, predict and save memory."""
