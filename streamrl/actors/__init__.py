"""Ray actors that host the stages. The only room that knows Ray."""

import gc

# Whoever hosts a stage imports engines: a million objects that stay. Looking for garbage among them
# at every few hundred is a seventh of the CPU time in which a run starts.
gc.set_threshold(10_000)
