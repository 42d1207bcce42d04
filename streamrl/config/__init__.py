"""Run configuration: read, check, and convert to placements and planner problems."""
