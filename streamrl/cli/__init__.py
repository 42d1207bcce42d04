"""The command line: train, evaluate, report, doctor."""
