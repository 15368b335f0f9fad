"""Ragged batches over ranks: sequences packed end to end, where their tokens lie, and how they travel."""
