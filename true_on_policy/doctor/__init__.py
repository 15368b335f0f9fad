"""`python -m true_on_policy doctor` compares what trainer and engine really run with the contract."""
