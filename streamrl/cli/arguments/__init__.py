"""Parse and check what the commands take."""
