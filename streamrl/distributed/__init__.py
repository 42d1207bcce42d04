"""torch.distributed process groups, and the store their ranks meet at."""
