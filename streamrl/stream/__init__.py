"""Parts of the loops in pipeline.py: run state, stage workers, training steps, device leases."""
