"""Readers of data files: formats, random access, normalization of rows."""
