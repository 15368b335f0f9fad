"""Readers of what runs leave behind: one file a format, each of which yields the neutral record of a response."""
