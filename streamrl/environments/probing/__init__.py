"""Probes of an environment with scripted policies, before a model meets it."""
