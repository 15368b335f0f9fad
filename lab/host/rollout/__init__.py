"""How the embedded host samples and scores responses."""
