"""Base classes and shared types of rewards."""
