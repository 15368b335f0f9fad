"""Models in an agreed order of rounding, and tiny checkpoints for proofs."""
