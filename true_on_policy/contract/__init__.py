"""What trainer and engine must share, as checked data; `python -m true_on_policy contract` shows it."""
