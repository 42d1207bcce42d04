"""Engines behind the stages: generation, training and scoring forward passes; free of Ray."""
