"""Numbers as a command line spells them: types for argparse, which refuse what no tensor and no loop can use."""

from argparse import ArgumentTypeError

from mis_plugins.errors import LARGEST, shown


def whole(text: str) -> int:
    """A whole number that 64 bits hold; raises ArgumentTypeError for any other text."""
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"got {shown(text)}; expected a whole number") from None
    if abs(value) > LARGEST:
        raise ArgumentTypeError(f"got {shown(text)}; the largest whole number is {LARGEST}")
    return value


def count(text: str) -> int:
    """A whole number of at least 1; raises ArgumentTypeError for any other text."""
    if (value := whole(text)) < 1:
        raise ArgumentTypeError(f"got {value}; expected at least 1")
    return value
