"""Importance weights, rejection and diagnostics for the train-inference mismatch of RL training.

A host loads `mis_plugins.mis` by dotted path; `mis_plugins.correction.pipeline.correct` is the pipeline behind it;
`python -m lab.host` is a small RL run to try it on. No host and no Megatron is imported outside `local`.
"""

__version__ = "0.1.0"
