"""Room `dumps`: strangers' files of every kind of `tests/shared/test_fuzz.py`, under its watch of what Python does."""

from __future__ import annotations

import tempfile
import warnings
from functools import cache
from pathlib import Path

from hypothesis import strategies as st
from test_fuzz import KINDS, Watch, fault_of

READ = set[tuple[str, object]]()
"""Kinds of files and readers that this process has met."""


@cache
def watch() -> Watch:
    """The one watch of this process, since an audit hook stays."""
    return Watch()


def cases() -> st.SearchStrategy[tuple[str, bytes]]:
    warnings.filterwarnings("ignore", "Duplicate name")  # of zipfile, while an archive is made
    return st.sampled_from(sorted(KINDS)).flatmap(lambda kind: KINDS[kind][0].map(lambda content: (kind, content)))


def judge(case: tuple[str, bytes]) -> str:
    kind, content = case
    _, suffix, reads = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a{suffix}")
        path.write_bytes(content)
        for read in reads:
            if (kind, read) not in READ:
                fault_of(watch(), path, read)  # a first reading imports what later ones use
                READ.add((kind, read))
            assert not (fault := fault_of(watch(), path, read)), f"{kind}: {fault}"
    return "right"
