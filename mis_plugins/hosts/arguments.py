"""Which arguments a host has, and what it takes for each: a config file beside `mis:` may set any of them.

A host makes an argument of every key, whatever its name, and keeps the value as YAML reads it. The records beside this
file are printed from the hosts' own parsers by `lab/host_arguments.py`; their first lines name the commits.
`newer.txt` holds single arguments of newer files, whose parsers cannot be run.
"""

import difflib
import math
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, Literal, cast

from mis_plugins.config import reading
from mis_plugins.config.messages import recorded_lines
from mis_plugins.errors import shown
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.registry import every_host

Kind = Literal["switch", "number", "text", "other"]
TOLD = 20  # keys that get a warning of their own
COMPARISON = "bitwise"  # read by the hooks of true_on_policy.hosts
NEWER = "newer"


def recorded() -> dict[str, Host]:
    """The hosts whose arguments are recorded, by name."""
    return {name: host for name, host in every_host().items() if host.records}


@cache
def kinds(host: Host) -> Mapping[str, Kind]:
    """What `host` takes for each of its recorded arguments, by name."""
    records = (NEWER, *reversed(host.records)) if host.records else ()
    lines = [line.split() for record in records for line in recorded_lines(record)]
    by_name: dict[str, Kind] = {name: cast(Kind, kind) for name, kind, *_ in lines}
    engines = [name for name in by_name if host.eval_engines and name.startswith("sglang_")]
    repeated: dict[str, Kind] = {f"eval_{name}": by_name[name] for name in engines}
    return by_name | repeated


def flags(record: str, kind: Kind | None = None) -> set[str]:
    """Every flag of the parser that `record` is named after; of one kind, where that is given."""
    rows = [line.split() for line in recorded_lines(record)]
    of_kind = [(name, given) for name, recorded_kind, *given in rows if kind in (None, recorded_kind)]
    return {flag for name, given in of_kind for flag in given or ["--" + name.replace("_", "-")]}


def surprises(keys: Mapping[str, Any], host: Host | None) -> Iterator[str]:
    """Warnings about keys of a config file that a host does not know, or whose value has the wrong type.

    Args:
        keys: the top-level keys, with what YAML made of their values.
        host: the host whose arguments count; None is every host with a record.
    """
    hosts = tuple(recorded().values()) if host is None else (host,)
    odd = list(_odd(keys, hosts))
    for key, value, wanted in odd[:TOLD]:
        if wanted:
            yield f"{key}: {_taken(value, wanted[0])}"
        else:
            meant = near(key, {name for host in hosts for name in kinds(host)})
            yield f"{key}: no argument of {_named(hosts)}{meant}; only a function of your own would read it"
    if len(odd) > TOLD:
        yield f"{len(odd) - TOLD} more keys are no argument of {_named(hosts)}, or have a value of another type"


def _odd(keys: Mapping[str, Any], hosts: tuple[Host, ...]) -> Iterator[tuple[str, Any, list[Kind]]]:
    """Keys that no host knows, or whose value has the wrong type: with the value, and what each host takes."""
    for key, value in keys.items():
        if reading.is_read(key, value) or key == COMPARISON:
            continue
        wanted: list[Kind] = [kinds(host)[key] for host in hosts if key in kinds(host)]
        if not any(_fits(value, kind) for kind in wanted):
            yield key, value, wanted


def _named(hosts: tuple[Host, ...]) -> str:
    *others, last = (host.title for host in hosts)
    return f"{', '.join(others)} or {last}" if others else last


def near(name: str, names: Collection[str], alike: float = 0.6) -> str:
    """The question `(did you mean NAME?)` for the nearest of some names; empty where no name is near enough."""
    nearest = difflib.get_close_matches(name, sorted(names), 1, alike)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def _fits(value: Any, kind: Kind) -> bool:
    if value is None or kind == "other":
        return True
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, bool if kind == "switch" else str)


def _taken(value: Any, kind: Kind) -> str:
    """Say how the host takes a value of the wrong type, and how to write the right one."""
    if kind == "switch":
        return f"got {shown(value)}; the host expects true or false, and takes any text for true"
    if kind == "text":
        return f"YAML reads {shown(value)}, and the host expects text; put it in quotes"
    number = _as_number(value)
    if number is None:
        return f"got {shown(value)}; the host expects a number"
    return f"YAML reads {shown(value)} as text, which the host keeps, and it expects a number; write {number}"


def _as_number(value: Any) -> str | None:
    """A number that Python reads in a text, spelled so that YAML reads it too; None where there is none."""
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        return None
    if number is None or not math.isfinite(number):
        return None
    if value.strip().isdecimal():
        return str(int(value))
    mantissa, e, exponent = repr(number).partition("e")
    return f"{mantissa}{'' if '.' in mantissa or not e else '.0'}{e}{exponent}"
