"""`python -m true_on_policy diff`: two recordings compared, and the first operation that diverges."""
