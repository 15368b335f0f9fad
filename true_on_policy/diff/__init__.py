"""`python -m true_on_policy diff` compares two recordings and names the first operation that diverges."""
