"""What our hooks import of each host, or read in its frames: one table a host, each need named once."""
