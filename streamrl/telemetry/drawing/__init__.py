"""Dataflow graphs as text, DOT and Mermaid, and timelines of placements as SVG."""
