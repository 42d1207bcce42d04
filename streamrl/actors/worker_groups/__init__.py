"""Worker groups with real engines, and a standalone queue, for own loops."""
