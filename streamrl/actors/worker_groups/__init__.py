"""Worker groups with real engines, for own loops."""
