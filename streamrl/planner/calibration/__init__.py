"""Calibration: fit timings and cost constants to a run, and measure the simulator's error."""
