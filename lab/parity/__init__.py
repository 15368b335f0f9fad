"""The parts of host_parity.py: questions, the host that answers, the right answers, and the distance to them."""
