"""`python -m true_on_policy verify` compares the engine's log-probs with the trainer's, by bytes."""
