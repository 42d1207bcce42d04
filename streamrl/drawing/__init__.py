"""What is drawn: an algorithm's graph, and a placement's devices over time, as SVG."""
