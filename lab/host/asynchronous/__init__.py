"""The asynchronous half of the embedded host: a worker process that generates while the trainer steps.

worker           the process: batches of responses, stepped a token at a time, between commands
messages         what trainer and worker say to each other
process          the worker as the trainer sees it: started, heard, found dead, stopped
response         a response while it grows, and who wrote each token
pool             responses on their way, and the recompute before an update
update_hooks     hooks before and after a pause and a resume
staleness_bound  how far ahead a rollout may begin
ledger           every response from its first token to the trainer, whatever becomes of the worker
controller       when rollouts begin, how the weights move, what happens when the worker dies
scoring          log-probs of the trainer for the recompute
source           the rollouts of a run, on all ranks, and what it cost to get them
measure          segment-wise and standard weights of a rollout, by age
summary          the part of these numbers that goes into summary.json
"""
