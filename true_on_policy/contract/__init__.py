"""`python -m true_on_policy contract` shows what both sides must share; this room holds it as data that is checked."""
