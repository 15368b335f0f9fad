"""The parts of host_parity.py: what is asked, of whom, what the answer must be, and how far off it is."""
