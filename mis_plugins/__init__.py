"""Importance weights, rejection and diagnostics for the train-inference mismatch of RL training.

A host loads `mis_plugins.mis` by dotted path; `mis_plugins.correction.pipeline.correct` is the pipeline behind it;
`python -m lab.host`, in a checkout, is a small RL run to try it on. No host and no Megatron is imported here.
"""

from mis_plugins.shared import moved as _moved  # noqa: F401  refuses imports of earlier releases

__version__ = "0.1.0"
