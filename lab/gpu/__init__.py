"""The sections of gpu_session.py: each answers one question on the accelerator, in a process of its own."""
