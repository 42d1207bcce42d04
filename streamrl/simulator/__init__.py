"""A run in virtual time: what a placement would do, by the books and the loops of real runs."""
