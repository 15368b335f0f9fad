"""The judges: packages of others, called as installed."""
