"""Ray actors that host the stages. The only room that knows Ray."""
