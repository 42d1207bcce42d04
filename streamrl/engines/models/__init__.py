"""transformers models: load, check, add heads and adapters, split over ranks, save."""
