"""Serve `mis_plugins.versions.recompute` at an address that scripts of users import."""

from mis_plugins.versions.recompute import *  # noqa: F403
