"""Hugging Face transformers as a rollout engine of this process: its record and its decoding."""
