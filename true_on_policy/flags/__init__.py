"""`python -m true_on_policy flags` prints the arguments of a launch under a contract."""
