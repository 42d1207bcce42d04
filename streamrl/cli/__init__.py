"""The command line: train, evaluate, doctor."""
