"""The embedded host's command line."""
