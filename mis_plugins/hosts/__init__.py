"""One adapter a host: what it hands us, as ranks and layout. No math here, and no host imported at module level."""
