"""Are the engine's weights the trainer's? Every tensor of a running engine against those of a checkpoint, by name."""
