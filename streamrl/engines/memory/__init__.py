"""Memory of engines: predict, measure and reduce it."""
