"""Which placement is best: exact and random search, rules, and an oracle. Pure."""
