"""Prompt data: files of any size, rendered on demand, streamed in endless resumable epochs."""
