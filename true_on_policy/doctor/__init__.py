"""`python -m true_on_policy doctor`: what trainer and engine really run, beside the contract."""
