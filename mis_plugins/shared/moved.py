"""Modules of earlier releases: an import is refused with what took its place, for one release (`moved.yaml`)."""

import sys
from collections.abc import Mapping
from pathlib import Path

OURS = ("mis_plugins.", "true_on_policy.", "lab.")


def moved() -> Mapping[str, str]:
    """What took the place of each module: a module, or a command."""
    import yaml  # loaded where an import fails

    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


class Former:
    """The last finder of imports: it is asked for modules that no other finder has."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for a module of an earlier release."""
        if not name.startswith(OURS):
            return
        if new := moved().get(name):
            where = "in a checkout of mis-plugins, " if "lab." in new else ""
            raise ModuleNotFoundError(f"{name} is gone: {where}{new} takes its place", name=name)


sys.meta_path.append(Former)
