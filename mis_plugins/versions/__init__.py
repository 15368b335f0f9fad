"""Segment-wise weights: which weight version wrote each token, what is kept of it, and hooks around an update."""
