"""Reports of plans and advice."""
