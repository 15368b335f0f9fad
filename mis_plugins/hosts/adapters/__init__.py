"""The adapter of each host: one file each, which makes the host's record as `HOST`."""
