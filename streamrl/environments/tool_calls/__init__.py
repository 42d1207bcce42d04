"""Tools of an environment: schemas, calls in sampled turns, results as text."""
