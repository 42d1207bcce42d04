"""Problem of the planner: models, workload, stages and their timings."""
