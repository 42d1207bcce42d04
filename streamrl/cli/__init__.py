"""The command line: train, scale, evaluate, score, rewards, data, algorithms, report, doctor."""
