"""Start, place, watch, scale and stop the actors of a run."""
