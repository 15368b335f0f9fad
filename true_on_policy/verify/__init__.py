"""`python -m true_on_policy verify`: the engine's log-probs against the trainer's, by bytes."""
