"""The asynchronous half of the embedded host: a thread that generates while the trainer steps.

controller when rollouts begin, what steps when, how the weights move
scoring    log-probs of the trainer for the recompute
source     the rollouts of a run, on all ranks, and what it cost to get them
measure    segment-wise and standard weights of a rollout, by age
summary    the part of these numbers that goes into summary.json
"""
