"""Routing: which experts the engine and the trainer gave a token to, and whether the trainer replayed the engine's."""
