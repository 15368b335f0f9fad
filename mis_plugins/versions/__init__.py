"""Segment-wise weights: which version wrote each token, and its log-prob under the next version."""
