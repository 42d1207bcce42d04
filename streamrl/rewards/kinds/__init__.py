"""Built-in reward kinds."""
