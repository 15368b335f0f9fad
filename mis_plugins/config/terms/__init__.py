"""What is known of one token by one name: a statistic, a bound, an estimator of the KL.

A record holds all of it: the value, its range, its formula, its words. Nothing here imports torch, so that a command
line checks a config without it: values are made by the methods of the tensors that they are given.
"""
