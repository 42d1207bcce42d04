"""Drawings of a dataflow graph as SVG, text or DOT, and of a placement's timeline as SVG."""
