"""Segment-wise weights: which version wrote each token, its log-prob under the next version, hooks around an update."""
