"""The types every reward is made of."""
