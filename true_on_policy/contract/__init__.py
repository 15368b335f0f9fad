"""`python -m true_on_policy contract`: what both sides must share, as data that is checked."""
