"""What a shell makes of texts: words cut at blanks, quotations without their backslashes, printed lines."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mis_plugins.explain.launch.words import HOLE, Piece, Text, Word, shown

Value = Text | list[Word]  # of a variable, of an array


def fits_pattern(said: str, pattern: str) -> bool:
    return said == pattern or (
        len(pattern) < 256 and pattern.count("*") < 4 and fnmatch.fnmatchcase(said, pattern)
    )


def unescaped(said: str) -> str:
    """A word without the backslashes that quote one letter."""
    letters = iter(said)
    return "".join(next(letters, "") if letter == "\\" else letter for letter in letters).replace("\n", "")


def unescaped_in_quotes(said: str) -> str:
    """Text of double quotes, where a backslash quotes a few letters only."""
    for letter in '"$`':
        said = said.replace(f"\\{letter}", letter)
    return said.replace("\\\n", "").replace("\\\\", "\\")


def word_of(text: Text, lines: tuple[int, int]) -> Word:
    """A word of a text; one of which a branch gives a part only is not known."""
    branches = {piece.branch for piece in text}
    whole = "".join(HOLE if piece.text is None else piece.text for piece in text)
    if len(branches) > 1:
        return Word(HOLE, " or ".join(shown((piece,)) for piece in text), lines)
    return Word(whole, shown(text), lines, next(iter(branches), None))


def text_of_word(word: Word) -> Text:
    """The text of a word."""
    if word.is_known:
        return (Piece(word.text, lines=word.lines, branch=word.branch),) if word.text else ()
    return (Piece(None, word.source, word.lines, word.branch),)


def spaced(words: Sequence[Word]) -> Text:
    pieces = [piece for word in words for piece in (*text_of_word(word), Piece(" ", lines=word.lines))]
    return tuple(pieces[:-1])


def fields(text: Text) -> list[Word]:
    """The words of a text, cut at blanks."""
    fields: list[list[Piece]] = [[]]
    for piece in text:
        if piece.text is None:
            fields[-1].append(piece)
            continue
        first, *more = piece.text.replace("\t", " ").replace("\n", " ").split(" ")
        fields[-1] += [replace(piece, text=first)] if first else []
        fields += [[replace(piece, text=part)] if part else [] for part in more]
    return [word_of(tuple(field), field[0].lines) for field in fields if field]


def as_words(value: Value) -> list[Word]:
    return value if isinstance(value, list) else fields(value)


def joined_words(one: list[Word], other: list[Word], label: str) -> list[Word]:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    left = [replace(word, branch=word.branch or label) for word in one[count:]]
    right = [replace(word, branch=word.branch or f"not: {label}") for word in other[count:]]
    return one[:count] + left + right


def cost(value: Text | list[Word]) -> int:
    return sum(1 + len(part.text or "") for part in value)


def echoed(words: Sequence[Word]) -> Text:
    given = [word for word in words if word.text not in ("-e", "-n")]
    return (*spaced(given), Piece("\n"))


def formatted(words: Sequence[Word]) -> Text:
    """`printf FORMAT ARGUMENT ...` with %s alone."""
    if not words or not words[0].is_known or words[0].text.startswith("-"):
        return (Piece(None, " ".join(word.source for word in words)),)
    arguments = iter(words[1:])
    parts = words[0].text.replace("\\n", "\n").replace("%d", "%s").split("%s")
    pieces: list[Piece] = [Piece(parts[0])]
    for part in parts[1:]:
        word = next(arguments, None)
        pieces += [*(text_of_word(word) if word else ()), Piece(part)]
    return tuple(pieces)


def named_hosts(words: Iterable[Word]) -> frozenset[str]:
    """Hosts whose folder a command names."""
    parts = {part.lower() for word in words for part in word.source.replace(":", "/").split("/")}
    return frozenset(host for host in ("miles", "slime") if host in parts)
