"""The asynchronous half of the embedded host: a thread that generates while the trainer steps.

controller       how far ahead a rollout may begin, what steps when, how the weights move
response         a response while it grows, and who wrote each token
pool             responses on their way, and the recompute before an update
update_hooks     hooks before and after a pause and a resume
scoring          log-probs of the trainer for the recompute
source           the rollouts of a run, on all ranks, and what it cost to get them
measure          segment-wise and standard weights of a rollout, by age, and the part that goes into summary.json
"""
