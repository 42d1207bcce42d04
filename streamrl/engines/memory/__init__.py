"""Predict, measure and reduce the memory of trainers and generators."""
