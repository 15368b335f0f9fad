"""Nodes of a script in bash, as the parser gives them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tree_sitter import Node
else:
    Node = Any  # the parser is an extra, which may not be installed

ENDS_ROUND = ("break", "continue")
ASSIGNMENTS = ("variable_assignment", "variable_assignments")
SUCCEEDS = (*ASSIGNMENTS, "declaration_command", "function_definition")
EXPANSIONS = ("simple_expansion", "expansion", "command_substitution")
CLAUSES = ("elif_clause", "else_clause")
NO_STATEMENTS = (*CLAUSES, "comment")
QUOTED = ("string", "raw_string", "ansi_c_string")


def says(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")


def one_line(node: Node) -> str:
    """The first line of what a node says."""
    return says(node).partition("\n")[0]


def parts_of(node: Node, kind: str) -> Iterator[Node]:
    """Redirects and pipes of a statement, which the parser may put beside or into a heredoc's."""
    for child in node.children:
        if child.type == kind:
            yield child
        elif child.type == "heredoc_redirect":
            yield from parts_of(child, kind)


def clauses_of(node: Node) -> Iterator[tuple[list[Node], list[Node]]]:
    """Conditions and body of `if`, of each `elif`, and of `else`, which has no condition."""
    kinds = [child.type for child in node.children]
    then = 0 if node.type == "else_clause" else [*kinds, "then"].index("then")
    parts = node.children[:then], node.children[then:]
    conditions, body = (
        [statement for statement in part if statement.is_named and statement.type not in NO_STATEMENTS]
        for part in parts
    )
    yield conditions, body
    for child in node.children:
        if child.type in CLAUSES:
            yield from clauses_of(child)


def of_lines_before(node: Node) -> list[Node]:
    """Assignments of the lines before a command, `A=x B=y`, which the parser puts in front of the command."""
    source, before = node.text or b"", 0
    for count, (first, second) in enumerate(pairwise(node.children), 1):
        if first.type != "variable_assignment":
            break
        between = source[first.end_byte - node.start_byte : second.start_byte - node.start_byte]
        before = count if b"\n" in between.replace(b"\\\n", b"") else before
    return node.children[:before]


def ends_early(node: Node) -> bool:
    """Whether a round of a loop may end before the end of its body."""
    is_such = node.type == "command" and says(node).partition(" ")[0] in ENDS_ROUND
    return is_such or any(map(ends_early, node.named_children))


def succeeds(statement: Node) -> bool:
    """Whether a statement cannot fail: an assignment fails where a command in it does."""
    runs = statement.type in ASSIGNMENTS and ("$(" in says(statement) or "`" in says(statement))
    return statement.type in SUCCEEDS and not runs


def is_apart(node: Node) -> bool:
    """Whether a statement runs in a shell of its own: in brackets, in the background, or as a part of a pipeline."""
    if node.type == "subshell" or node.next_sibling is not None and node.next_sibling.type == "&":
        return True
    is_part = node.parent is not None and node.parent.type == "pipeline"
    return is_part or node.type == "redirected_statement" and any(parts_of(node, "pipeline"))
