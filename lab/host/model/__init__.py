"""The embedded host's language model and its decoding."""
