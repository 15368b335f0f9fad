"""The part of `docs/receipts.md` that is made of the receipts in `lab/results/receipts`: one line a receipt.

python -m lab.pages.receipts
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.pages.receipts:main", extra="dev")

import re
from collections.abc import Iterator
from pathlib import Path

from lab.gpu.receipt import Receipt, held, read, shown
from lab.pages import parts
from lab.provenance import markdown_table
from mis_plugins.shared.budget import RecordError

FOLDER = Path(__file__).parents[1] / "results" / "receipts"
NAME = re.compile(r"[\w-]+\.json")  # of a file that a page can link to
NONE = "No receipt yet: nobody has run a session on a GPU and sent its receipt."
COLUMNS = ("receipt", "commit", "GPU", "torch", "CUDA, driver", "demands", "first operation that differs")


def part(_: str, folder: Path = FOLDER) -> str:
    """Proofs as a table, then each file that is none, with the reason."""
    proofs, refused = list[tuple[str, ...]](), list[str]()
    for file in sorted(folder.glob("*")):
        try:
            receipt = proof(file)
        except RecordError as error:
            refused.append(f"- `{shown(file.name)}` is refused: {shown(str(error).replace(f'{file}: ', ''))}\n")
        else:
            proofs.append(tuple(row(file.name, receipt)))
    table = markdown_table(COLUMNS, proofs) if proofs else f"{NONE}\n"
    return "\n".join([table, "".join(refused)]).rstrip()


def proof(file: Path) -> Receipt:
    """Read a receipt that proves something, whether its demands hold or not.

    Raises:
        RecordError: the file is no receipt, or of a dry run, or names no commit.
    """
    if not NAME.fullmatch(file.name):
        raise RecordError("is no name that this page can link to; name the file COMMIT-GPU.json")
    receipt = read(file)
    if reasons := list(receipt.lacks()):
        raise RecordError("; ".join(reasons))
    return receipt


def row(name: str, receipt: Receipt) -> Iterator[str]:
    """The cells of a receipt."""
    on = receipt.measured
    yield f"[{name}](../lab/results/receipts/{name})"
    difference = receipt.first_difference() or "none"
    for text in (on.commit, on.gpu, on.torch, f"{on.cuda}, {on.driver}", held(receipt.sections), difference):
        yield shown(text)


def main() -> int:
    """Write the part."""
    return parts.write("receipts.md", part, __doc__)
