"""Claim, create and resume run directories; stop a run on a signal."""
