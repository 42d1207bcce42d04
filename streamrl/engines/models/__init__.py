"""transformers models: load, check, adapt, split and save them."""
