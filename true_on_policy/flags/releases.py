"""The table of flags by release of Miles, slime, SGLang and Megatron, and a check of installed sources.

The releases were read: a flag exists where one of its owner's `FILES` declares the flag. Installed sources
are read as text and never imported. Miles builds SGLang's branch sglang-miles; SGLang's PyPI releases lack
the contract.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from true_on_policy.errors import ContractError

# The files in which each owner declares its flags, as pathlib's patterns below the folder of its package. An owner
# without its first file is not installed: the wheel megatron-core, for one, holds no megatron/training.
FILES = {
    "miles": ("utils/arguments.py",),
    "fsdp": ("backends/fsdp_utils/arguments.py",),
    "slime": ("utils/arguments.py",),
    "sglang": ("srt/server_args.py", "srt/arg_groups/fields/*.py"),
    "megatron": (
        "training/arguments.py",
        "training/config/*.py",
        "core/transformer/transformer_config.py",
        "core/model_parallel_config.py",
    ),
}
# The package of each owner, and the distribution that states its version.
PACKAGES = {
    "miles": ("miles", "miles"),
    "fsdp": ("miles", "miles"),
    "slime": ("slime", "slime"),
    "sglang": ("sglang", "sglang"),
    "megatron": ("megatron", "megatron-core"),
}


@dataclass(frozen=True)
class Release:
    """A release whose sources were read.

    Attributes:
        owner: a key of FILES.
        name: the release or branch, with the commit or the wheel that was read.
        lacks: flags of a true-on-policy launch that the release lacks; its sources declare all others.
    """

    owner: str
    name: str
    lacks: tuple[str, ...] = ()


RELEASES = (
    Release("miles", "Miles v0.1.0 (78527b91)"),
    Release("miles", "Miles main (31f1ca96)"),
    Release("fsdp", "Miles v0.1.0 (78527b91)"),
    Release("fsdp", "Miles main (31f1ca96)"),
    Release("sglang", "sgl-project/sglang branch sglang-miles (98f6dd71)"),
    Release("sglang", "SGLang 0.5.17 (PyPI)", lacks=("--true-on-policy-contract",)),
    Release("sglang", "SGLang 0.5.23 (PyPI)", lacks=("--true-on-policy-contract",)),
    Release("megatron", "radixark/Megatron-LM miles-main (37f91617, pinned by Miles v0.1.0)"),
    Release("megatron", "radixark/Megatron-LM miles-main (2e64d788)"),
    Release("megatron", "NVIDIA/Megatron-LM main (d98e8a64)", lacks=("--true-on-policy-contract",)),
    Release("slime", "slime v0.3.1", lacks=("--true-on-policy-mode", "--recompute-logprobs-via-prefill")),
    Release(
        "slime", "slime main (624b824a)", lacks=("--true-on-policy-mode", "--recompute-logprobs-via-prefill")
    ),
)


def releases_with(owner: str, flag: str) -> list[str]:
    """Name the releases of `owner` that declare `flag`."""
    return [release.name for release in RELEASES if release.owner == owner and flag not in release.lacks]


def installed(owner: str) -> str | None:
    """Return the package and version of an owner that is installed here; None where it is not."""
    package, distribution = PACKAGES[owner]
    if not _sources(owner):
        return None
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} (a checkout)"


def check_installed(owner: str, flags: Sequence[str]) -> bool:
    """Check that the installed sources of `owner` declare each flag; False where `owner` is not installed.

    Raises:
        ContractError: the installed sources lack a flag; the message names the releases that have it.
    """
    found = installed(owner)
    if found is None:
        return False
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in _sources(owner))
    for flag in flags:
        if not declares(text, flag):
            raise ContractError(
                f"{found} has no {flag}; seen in {', '.join(releases_with(owner, flag)) or 'no release'}. "
                "Install that one, or launch without true-on-policy"
            )
    return True


def declares(text: str, flag: str) -> bool:
    """Whether a parser's source declares `flag`: by its name in quotes, or as a field that becomes a flag."""
    field = flag.removeprefix("--").replace("-", "_")
    return re.search(rf"""["']{flag}["']|^ +{field}: """, text, re.MULTILINE) is not None


def _sources(owner: str) -> list[Path]:
    spec = importlib.util.find_spec(PACKAGES[owner][0])
    for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
        if (folder / FILES[owner][0]).exists():
            return [path for pattern in FILES[owner] for path in sorted(folder.glob(pattern))]
    return []
