"""How far apart two policies are taken to be at most."""

LOG_RATIO_LIMIT = 20.0
"""exp() of more than this says nothing more and overflows sooner or later."""
