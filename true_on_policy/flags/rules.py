"""What a launch must hold: flags that must have been parsed, and settings with which no contract holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from true_on_policy.contract.families import IMAGES
from true_on_policy.errors import ContractError
from true_on_policy.flags.releases import releases_with

TEXT_ALONE = f"images are not certified: {'; '.join(IMAGES)}. Launch without --multimodal-keys"
PREFIX = "--sglang-"  # the hosts put this before SGLang's own flags


@dataclass(frozen=True)
class Flag:
    """A flag is one argument of a launch.

    Attributes:
        words: the words of the flag on the command line of Miles.
        owner: the program that declares the flag, a key of releases.FILES.
        attribute: the name of the flag among the host's parsed arguments.
        value: the value that the attribute must have.
    """

    words: tuple[str, ...]
    owner: str
    attribute: str
    value: Any

    @classmethod
    def of(cls, owner: str, name: str, value: Any = True, attribute: str = "", parsed: Any = None) -> Flag:
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

    Attributes:
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
        f"{rule.attribute} is {found!r}: {rule.why}"
        for rule in refusals
        if (found := getattr(args, rule.attribute, rule.allowed[0])) not in rule.allowed
    ]
    return refused + [fault for flag in flags if (fault := _unset(args, flag))]


def refuse(found: Iterable[str]) -> None:
    """Refuse a launch whose arguments or environment have faults.

    Raises:
        ContractError: there is a fault; the message has one line for each fault.
    """
    lines = "".join(f"\n  {fault}" for fault in found)
    if lines:
        raise ContractError(f"true-on-policy cannot hold:{lines}")


def _unset(args: Any, flag: Flag) -> str:
    words = " ".join(flag.words)
    if not hasattr(args, flag.attribute):
        seen = ", ".join(releases_with(flag.owner, flag.name))
        return f"{flag.attribute} is not among the host's arguments: the host has no {flag.words[0]}; seen in {seen}"
    found = plain(getattr(args, flag.attribute))
    return "" if found == flag.value else f"{flag.attribute} is {found!r}; launch with {words}"


def plain(value: Any) -> Any:
    """Return the word of a parsed value: Megatron turns some words into enums, and one into a list of equal words."""
    if isinstance(value, (list, tuple)) and len(set(value)) == 1:
        value = value[0]
    return getattr(value, "name", value)
