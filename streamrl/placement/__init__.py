"""Data of the planner: hardware, models, workload, devices per call, predicted cost."""
