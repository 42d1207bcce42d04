"""Journals on disk: append-only segment files, written with group commit."""
