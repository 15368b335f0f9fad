"""One record for each setting that trainer and engine must share, which `settings.yaml` holds and explains.

A host's arguments, a server's answer and the checks of the doctor are read by these records.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# The values that one side may show: None asks nothing of the side, an empty tuple accepts every value.
Wanted = tuple[str, ...] | None
ANY: Wanted = ()
Cases = Mapping[str, Any]


@dataclass(frozen=True)
class Check:
    """A check is one row of the doctor under a contract, before either side is observed.

    trainer, engine: the values that each side may show.
    remedy: what to set where a side shows another value.
    equal: whether both sides must show one value.
    """

    name: str
    trainer: Wanted
    engine: Wanted
    remedy: str = ""
    equal: bool = False


@dataclass(frozen=True)
class Setting:
    """A setting is one record of `settings.yaml`, under the names of its keys; `remedy` is `set`."""

    name: str
    trainer: str | list[str] | Cases | None = None
    engine: str | list[str] | Cases | None = None
    remedy: str | Cases = ""
    equal: str | None = None
    host: str = ""
    server: str = ""
    distribution: str = ""
    chosen: tuple[str, ...] = ()
    module: str = ""
    off: tuple[Any, ...] = (False, None)

    def check(self, cases: Collection[str], words: Mapping[str, str]) -> Check | None:
        """Return the check in the cases of a contract, with its words filled in; None where no side is asked."""

        def wanted(side: Any) -> Wanted:
            values = _in_case(side, cases)
            return ANY if values == "any" else values and tuple(each.format(**words) for each in values)

        trainer, engine = wanted(self.trainer), wanted(self.engine)
        if trainer is None and engine is None:
            return None
        remedy = (_in_case(self.remedy, cases) or "").format(**words)
        return Check(self.name, trainer, engine, remedy, self.equal in ("any", *cases))


def _in_case(value: Any, cases: Collection[str]) -> Any:
    """Return a value, of a mapping the entry of the first case that it has; None where it has none."""
    if not isinstance(value, Mapping):
        return value
    return next((value[case] for case in cases if case in value), None)


def _setting(row: dict[str, Any]) -> Setting:
    named: dict[str, Any] = {"remedy" if key == "set" else key: value for key, value in row.items()}
    named |= {key: tuple(named[key]) for key in ("chosen", "off") if key in named}
    return Setting(**named)


SETTINGS = tuple(map(_setting, yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text(encoding="utf-8"))))
OF_HOST = {setting.name: setting.host for setting in SETTINGS if setting.host and not setting.module}
OF_SERVER = {setting.name: setting.server for setting in SETTINGS if setting.server}
FUSED = tuple(setting for setting in SETTINGS if setting.module)
VERSIONS = {setting.name: setting.distribution for setting in SETTINGS if setting.distribution}
CHOSEN = {setting.name: setting.chosen for setting in SETTINGS if setting.chosen}
