"""Formatters for console output and output files of the commands."""
