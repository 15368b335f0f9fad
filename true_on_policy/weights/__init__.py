"""Compare every tensor of a running engine with the weights of a checkpoint, by name and by bits."""
