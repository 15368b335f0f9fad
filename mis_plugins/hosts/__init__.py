"""Adapters that turn a host's inputs into ranks and layout. No math, and no host imported at module level."""
