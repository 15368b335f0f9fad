"""`python -m true_on_policy flags`: the arguments of a launch that a contract asks for."""
