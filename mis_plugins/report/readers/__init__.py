"""Readers of what runs leave behind: one file a format, each of which yields the neutral record of a response.

What a reader cannot read raises a `RecordError`, or the error of a library: `Problems.read` tells both, and goes on.
"""
