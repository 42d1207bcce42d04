"""torch.distributed process groups and the TCP store for their rendezvous."""
