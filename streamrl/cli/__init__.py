"""The command line: train, scale, evaluate, score, rewards, algorithms, report, doctor."""
