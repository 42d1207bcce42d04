"""Resharding: layouts of a model over ranks, and plans that move tensors between layouts."""
