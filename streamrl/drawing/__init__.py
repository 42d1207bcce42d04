"""Pictures of an algorithm's dataflow graph and of a placement's timeline, as SVG."""
