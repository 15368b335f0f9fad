"""Serve `mis_plugins.versions.staleness_bound` at an address that scripts of users import."""

from mis_plugins.versions.staleness_bound import *  # noqa: F403
