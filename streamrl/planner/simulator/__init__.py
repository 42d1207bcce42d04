"""Simulator: predict the metrics of a run under a placement.

The simulator runs the stream's own loops, ledger and admission control on a virtual clock.
"""
