"""Simulated processes: generators, scorers, trainers, queue, devices."""
