"""The numbers that a user reads: per token, and per optimizer step."""
