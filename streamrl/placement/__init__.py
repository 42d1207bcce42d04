"""Devices of a run: pools of roles and their slots, resources requested from Ray, placements.

A run reads the settings, pools and resource demands; the planner also computes with clusters,
meshes and placements.
"""
