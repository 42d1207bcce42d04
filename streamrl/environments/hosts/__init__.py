"""Environments of users, in worker processes that can be killed."""
