"""Serve `mis_plugins.versions.update_hooks` at an address that scripts of users import."""

from mis_plugins.versions.update_hooks import *  # noqa: F403
