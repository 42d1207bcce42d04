"""Published figures of other systems, and what the planner makes of the same runs."""
