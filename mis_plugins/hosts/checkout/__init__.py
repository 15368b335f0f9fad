"""Look for the needs of our hooks in a host's source: by syntax alone, nothing of it is imported or run."""
