"""Dataflow graphs as text, DOT and Mermaid."""
