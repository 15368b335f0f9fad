"""Serve `mis_plugins.versions.segment_wise` at an address that scripts of users import."""

from mis_plugins.versions.segment_wise import *  # noqa: F403
