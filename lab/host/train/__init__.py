"""How the embedded host trains."""
