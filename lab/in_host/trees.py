"""The two hosts and the trees that a run takes: which commits are known to work, and how a tree comes to that state."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.in_host import bends


class CannotRun(RuntimeError):
    """The host cannot be run here; the message says what to do."""


@dataclass(frozen=True)
class Host:
    """A host as it is run on a CPU.

    commit, megatron_commit: the commits of the host and of its Megatron that are known to work.
    patches: files of the host's checkout that its Megatron carries.
    launch: the launch script whose flags are taken.
    variable: the launch script's variable for the host's checkout.
    update: flags by which weights reach the engine.
    """

    name: str
    repository: str
    commit: str
    megatron: str
    megatron_commit: str
    launch: str
    variable: str
    patches: tuple[str, ...] = ()
    update: tuple[str, ...] = ()


FSDP_LAUNCH = "run-qwen3-4b-mis-fsdp.sh"
"""The launch script of Miles on FSDP."""

HOSTS = {
    "miles": Host(
        "miles", "radixark/miles", "31f1ca961", "radixark/Megatron-LM",
        "2e64d788b", "run-qwen3-4b-mis.sh", "MILES_DIR",
    ),
    "slime": Host(
        "slime", "THUDM/slime", "624b824a8", "NVIDIA/Megatron-LM", "1dcf0dafa8",
        "run-qwen3-4b-mis-slime.sh", "SLIME_DIR",
        ("docker/patch/latest/megatron.patch", "docker/patch/latest/megatron-sglang-aligned.patch"),
        # SGLang 0.5.23 answers 400 to weights by NCCL that no `begin_weight_update` announces.
        ("--update-weight-transport", "disk", "--update-weight-mode", "full"),
    ),
}  # fmt: skip


def check(host: Host, checkout: Path, megatron: Path) -> list[str]:
    """Compare the trees with the commits that are known to work; return a warning for each other commit.

    Raises:
        CannotRun: a tree is missing, a patch is not applied, or a line that a bend quotes has changed.
    """
    wanted = ((checkout, host.repository, host.commit), (megatron, host.megatron, host.megatron_commit))
    warnings = [warning for tree in wanted if (warning := _other_commit(*tree))]
    for patch in host.patches:
        if _git(megatron, "apply", "--reverse", "--check", str(checkout / patch)) is None:
            raise CannotRun(
                f"--megatron {megatron}: {patch} of {host.name} is not applied; run: "
                f"git -C {megatron} apply {checkout / patch}"
            )
    if lines := bends.changed({host.name: checkout, f"megatron-{host.name}": megatron}):
        raise CannotRun(
            "a bend of lab/in_host/bends.yaml quotes a line that changed; read it anew:\n" + "\n".join(lines)
        )
    return warnings


def _other_commit(tree: Path, repository: str, wanted: str) -> str | None:
    found = _git(tree, "rev-parse", "HEAD")
    if found is None:
        raise CannotRun(
            f"{tree}: no checkout of {repository}; run: git clone https://github.com/{repository} {tree} && "
            f"git -C {tree} checkout {wanted}"
        )
    return None if found.startswith(wanted) else f"{tree}: {repository} at {found[:9]}, known to work: {wanted[:9]}"


def commits(trees: Mapping[str, Path]) -> dict[str, str]:
    return {name: (_git(tree, "rev-parse", "HEAD") or "unknown")[:9] for name, tree in trees.items()}


def _git(tree: Path, *words: str) -> str | None:
    """Return what git says in a tree, or None where git fails."""
    done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
