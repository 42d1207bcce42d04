"""Save and load a trainer's state, for any backend and number of ranks."""
