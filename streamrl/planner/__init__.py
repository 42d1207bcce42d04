"""Planner: the placement that is fastest, by analytic costs, a simulator and measured timings."""
