"""The policy loss of a micro-batch: surrogate, off-policy sequence masking, entropy and KL."""
