"""Ray actors that host the stages of a run; no other package of the stream imports Ray."""
