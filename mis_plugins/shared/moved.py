"""Modules of earlier releases: an import is refused with the module that took its place, for one release."""

from __future__ import annotations

import sys
from collections.abc import Sequence

OURS = ("mis_plugins.", "true_on_policy.", "lab.")


class Former:
    """The last finder of imports: it is asked for modules that no other finder has."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for a module of an earlier release."""
        if not name.startswith(OURS):
            return
        from mis_plugins.shared.addresses import MOVED  # loaded where an import fails

        if new := MOVED.get(name):
            where = "in a checkout of mis-plugins, " if "lab." in new else ""
            raise ModuleNotFoundError(f"{name} is gone: {where}{new} takes its place", name=name)


sys.meta_path.append(Former)
