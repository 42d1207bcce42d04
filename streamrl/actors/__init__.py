"""Ray actors that host the stages; no other package of the stream imports Ray."""
