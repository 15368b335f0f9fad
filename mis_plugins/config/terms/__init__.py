"""Statistics of a token, bounds of a weight, policy losses and estimators of the KL, each by one name.

A record holds the value, its range, its formula and its words. Nothing here imports torch, so that a command
line checks a config without it: the functions call methods of the tensors that they are given.
"""
