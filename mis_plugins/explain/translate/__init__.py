"""Configs of other frameworks in our words: one file a framework."""
