"""Simulated processes: generators, scorers, trainers, queue and device leases."""
