"""Budgets: what reading one file of a stranger's may cost. A reader refuses a file beyond its budget, and names both.

A budget grows with the bytes of the file: a large honest file is read, and a few bytes cannot ask for gigabytes.
"""

import time
from dataclasses import dataclass

from mis_plugins.errors import UserError

MEGABYTE = 2**20


class RecordError(UserError):
    """A record or a dump that cannot be read or written."""


@dataclass(frozen=True)
class Budget:
    """A limit of one kind of cost: `base` for any file, and `per_byte` more for each byte of the file.

    what: the noun of the cost, as errors and docs/report.md say it.
    why: what a file beyond the budget would do.
    """

    what: str
    base: float
    per_byte: float
    why: str

    def most(self, size: int) -> float:
        """The limit for a file of `size` bytes."""
        return self.base + self.per_byte * size

    def check(self, amount: float, size: int, where: object) -> None:
        """Check a cost against the budget; a RecordError beyond it names the file and the budget."""
        if amount > (most := self.most(size)):
            whose = f"a file of {size:,} bytes" if self.per_byte else "any file"
            raise RecordError(f"{where}: asks for {amount:,.0f} {self.what}, and {whose} may ask for {int(most):,}")


INFLATED = Budget("inflated bytes", 256 * MEGABYTE, 20, "a small archive would inflate to gigabytes")
VALUES = Budget("values", 4 * MEGABYTE, 2, "a few bytes would name billions of numbers, entries or letters")
OBJECTS = Budget("objects", MEGABYTE, 1 / 8, "an object takes a hundred times the memory of its bytes in a file")
DEPTH = Budget("levels of nesting", 64, 0, "recursion would end the process")
LINE = Budget("bytes of one line", 64 * MEGABYTE, 0, "one line would be parsed into gigabytes of objects")
ITEMS = Budget("values of one record", 4 * MEGABYTE, 0, "empty lists in one record would take a hundred bytes each")
STEPS = Budget("steps", 100_000, 0, "each step of a run takes memory of its own, and a place on every curve")
CHANGES = Budget(
    "changes of the step (sort by step)", 2000, 1e-4, "each change of the step begins a batch, which takes milliseconds"
)
SECONDS = Budget("processor seconds of reading", 8, 10 / MEGABYTE, "a reader would never come to the end")
BUDGETS = (INFLATED, VALUES, OBJECTS, DEPTH, LINE, ITEMS, STEPS, CHANGES, SECONDS)


class Clock:
    """Processor seconds of its thread since the reading of one file began; `check` refuses the file beyond `SECONDS`.

    What the thread computes of the file's records counts too. Other processes of a busy machine count nothing.
    """

    def __init__(self, size: int, where: object):
        self.size, self.where, self.begun = size, where, time.thread_time()

    def is_over(self) -> bool:
        """Whether the time is up, for a parser that can only be told to stop."""
        return time.thread_time() - self.begun > SECONDS.most(self.size)

    def check(self) -> None:
        """Check the processor seconds since the reading began; raises RecordError where they are beyond the budget."""
        SECONDS.check(time.thread_time() - self.begun, self.size, self.where)
