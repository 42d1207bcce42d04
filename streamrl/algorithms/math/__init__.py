"""Advantages, losses, KL estimates and corrections: tensors in, tensors out."""
