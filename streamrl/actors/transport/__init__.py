"""Communication between actors: calls, columns of groups, and weights."""
