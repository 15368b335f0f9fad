"""The embedded host: a small, real RL run on CPU that loads hooks as Miles and slime do.

``python -m mis_plugins.local --help``
"""
