"""What a launch must hold: flags that must have been parsed, settings with which no contract holds, and releases.

The releases were read: a flag exists where one of its owner's `FILES` declares the flag. Installed sources are read as
text and never imported. Miles builds SGLang's branch sglang-miles; SGLang's PyPI releases lack the contract.
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from true_on_policy.contract.gpu import TABLE
from true_on_policy.errors import ContractError

FILES: dict[str, list[str]] = {owner: row["files"] for owner, row in TABLE["owners"].items()}


@dataclass(frozen=True)
class Release:
    """A release whose sources were read.

    owner: a key of FILES.
    name: the release or branch, with the commit or the wheel that was read.
    lacks: flags of a true-on-policy launch that the release lacks; its sources declare all others.
    """

    owner: str
    name: str
    lacks: Sequence[str] = ()


RELEASES = tuple(Release(**row) for row in TABLE["releases"])


def releases_with(owner: str, flag: str) -> list[str]:
    """Name the releases of `owner` that declare `flag`."""
    return [release.name for release in RELEASES if release.owner == owner and flag not in release.lacks]


def installed(owner: str) -> str | None:
    """Return the package and version of an owner that is installed here; None where it is not."""
    if not _sources(owner):
        return None
    distribution = TABLE["owners"][owner]["distribution"]
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{TABLE['owners'][owner]['package']} (a checkout)"


def check_installed(owner: str, flags: Sequence[str]) -> bool:
    """Check that the installed sources of `owner` declare each flag; False where `owner` is not installed.

    Raises:
        ContractError: the installed sources lack a flag; the message names the releases that have it.
    """
    release = installed(owner)
    if release is None:
        return False
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in _sources(owner))
    for flag in flags:
        if not declares(text, flag):
            raise ContractError(
                f"{release} has no {flag}; seen in {', '.join(releases_with(owner, flag)) or 'no release'}. "
                "Install that one, or launch without true-on-policy"
            )
    return True


def declares(text: str, flag: str) -> bool:
    """Whether a parser's source declares `flag`: by its name in quotes, or as a field that becomes a flag."""
    field = flag.removeprefix("--").replace("-", "_")
    return re.search(rf"""["']{flag}["']|^ +{field}: """, text, re.MULTILINE) is not None


def _sources(owner: str) -> list[Path]:
    spec = importlib.util.find_spec(TABLE["owners"][owner]["package"])
    for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
        if (folder / FILES[owner][0]).exists():
            return [path for pattern in FILES[owner] for path in sorted(folder.glob(pattern))]
    return []


PREFIX = "--sglang-"  # the hosts put this before SGLang's own flags


@dataclass(frozen=True)
class Flag:
    """A flag is one argument of a launch.

    words: the words of the flag on the command line of Miles.
    owner: the program that declares the flag, a key of FILES.
    attribute: the name of the flag among the host's parsed arguments.
    value: the value that the attribute must have.
    """

    words: tuple[str, ...]
    owner: str
    attribute: str
    value: Any

    @classmethod
    def of(cls, owner: str, name: str, value: Any = True, attribute: str = "", parsed: Any = None) -> "Flag":
        """Build a flag, bare where `value` is True; its attribute and parsed value follow its words by default."""
        words = (name,) if value is True else (name, str(value))
        own = attribute or name.removeprefix("--").replace("-", "_")
        return cls(words, owner, own, value if parsed is None else parsed)

    @property
    def name(self) -> str:
        """The flag as its owner spells it."""
        return self.words[0].replace(PREFIX, "--") if self.owner == "sglang" else self.words[0]


# Megatron's kernels that fuse what the engine computes one by one, and its dropout: off under each contract.
UNFUSED = (
    Flag.of("megatron", "--no-bias-swiglu-fusion", attribute="bias_swiglu_fusion", parsed=False),
    Flag.of("megatron", "--no-rope-fusion", attribute="apply_rope_fusion", parsed=False),
    Flag.of("megatron", "--attention-dropout", 0),
    Flag.of("megatron", "--hidden-dropout", 0),
)


@dataclass(frozen=True)
class Refusal:
    """A refusal names a setting of the host with which no contract holds.

    attribute: the name of the setting among the host's parsed arguments; a missing attribute is allowed.
    allowed: the values with which a contract holds.
    why: the reason in words, and what to set.
    """

    attribute: str
    allowed: tuple[Any, ...]
    why: str


def faults(args: Any, refusals: Iterable[Refusal], flags: Iterable[Flag]) -> list[str]:
    """List what keeps a contract from holding with a host's parsed arguments, one line each."""
    refused = [
        f"{rule.attribute} is {given!r}: {rule.why}"
        for rule in refusals
        if (given := getattr(args, rule.attribute, rule.allowed[0])) not in rule.allowed
    ]
    return refused + [fault for flag in flags if (fault := _unset(args, flag))]


def refuse(reasons: Iterable[str]) -> None:
    """Refuse a launch whose arguments or environment have faults; a ContractError has one line for each fault."""
    lines = "".join(f"\n  {fault}" for fault in reasons)
    if lines:
        raise ContractError(f"true-on-policy cannot hold:{lines}")


def _unset(args: Any, flag: Flag) -> str:
    words = " ".join(flag.words)
    if not hasattr(args, flag.attribute):
        seen = ", ".join(releases_with(flag.owner, flag.name))
        return f"{flag.attribute} is not among the host's arguments: the host has no {flag.words[0]}; seen in {seen}"
    given = plain(getattr(args, flag.attribute))
    return "" if given == flag.value else f"{flag.attribute} is {given!r}; launch with {words}"


def plain(value: Any) -> Any:
    """Return the word of a parsed value: Megatron turns some words into enums, and one into a list of equal words."""
    if isinstance(value, (list, tuple)) and len(set(value)) == 1:
        value = value[0]
    return getattr(value, "name", value)
