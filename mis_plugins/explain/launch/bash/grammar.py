"""Scripts in bash as the tree of tree-sitter's parser, with guards against what it gets wrong; what its nodes say."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mis_plugins.errors import ConfigError
from mis_plugins.shared.shell import not_installed

if TYPE_CHECKING:
    from tree_sitter import Language, Node, Query
else:
    Node = Any  # the parser is an extra, which may not be installed

OLDEST = "0.26.1"  # an older one ends the process where it is asked to stop, below Python 3.14
# Behind a brace the parser looks a character up in a table of 256, even one that the table does not hold. A bracket
# that begins a default, as in `${FILES:-["a"]}`, is an error to it, and none to bash.
LOOKED_UP = re.compile(r"(\{[0-9]*(?:\.\.[0-9]*)?(?=[^\x00-\xff])|\$\{\w+:?[-=](?=\[))(.)")
# An expansion in a word, `$A/b_$B.c`, and not in a sum: the parser ends the word in front, unless a colon is behind.
WITHIN_WORD = re.compile(
    r"\(\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)\)|(?<=[\w./:=,@%+^~\-\"'})]|[^\x00-\x7f])(\$\w+)([-+,./^~]|[^\x00-\x7f])",
    re.ASCII,
)
# Redirects between a heredoc and a pipe, and a heredoc in the background: the parser takes neither.
HEREDOC, REDIRECTS = r"<<-?[ \t]*(?:\w+|'\w+'|\"\w+\")", r"(?:[ \t]+\d?>(?:&\d|>?[ \t]*[^\s|&;<>]+))"
BEHIND_HEREDOC = re.compile(rf"({HEREDOC})({REDIRECTS}+)(?=[ \t]*\|)|({HEREDOC}{REDIRECTS}*)([ \t]*&)(?=[ \t]*\n)")
# A comment in backticks within a command that goes on, of which bash makes no word; the parser finds no end to it.
WITHIN = re.compile(rb"(?:(?<=[ \t])|^)`#[^`\n]*`(?=[ \t]*\\?\n)", re.M)
# A command whose last line goes on where the script ends, which is an error to the parser and none to bash.
LAST = re.compile(rb"(?<!\\)\\((?:\n\s*)?)\Z")
# Behind a line of several assignments the parser takes a keyword for a command, and loses where the branch ends.
KEYWORDS = '((command_name (word) @word) (#any-of? @word "then" "elif" "else" "fi" "do" "done" "esac"))'
ENDS_ROUND = ("break", "continue")
ASSIGNMENTS = ("variable_assignment", "variable_assignments")
SUCCEEDS = (*ASSIGNMENTS, "declaration_command", "function_definition")
EXPANSIONS = ("simple_expansion", "expansion", "command_substitution")
CLAUSES = ("elif_clause", "else_clause")
NO_STATEMENTS = (*CLAUSES, "comment")
QUOTED = ("string", "raw_string", "ansi_c_string")
ARITHMETIC = ("binary_expression", "unary_expression", "postfix_expression")
ASSIGNS = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^=", "++", "--")
# Statements in a statement, which are read on their own, and commands whose variables are gone afterwards.
WITHIN_STATEMENTS = ("do_group", "case_item", "if_statement", "case_statement", "for_statement", "while_statement",
                     "c_style_for_statement", "list", "pipeline", "command", "compound_statement", "subshell",
                     "redirected_statement", "command_substitution", "process_substitution")  # fmt: skip


def parsed(script: str, is_over: Callable[[], bool]) -> tuple[Node, list[Node]]:
    """The tree of a script, and the keywords in it that the parser took for commands.

    It raises ConfigError where the parser is not installed, is too old, or `is_over` stopped it.
    """
    try:
        import tree_sitter
        import tree_sitter_bash
    except ModuleNotFoundError as error:
        raise ConfigError(not_installed(error, "scripts")) from None
    check_version()
    language = tree_sitter.Language(tree_sitter_bash.language())
    parser = tree_sitter.Parser(language)
    # The parser reads letters in place of what it would look up; nodes get the text of the script as it is.
    script = WITHIN.sub(lambda match: b" " * len(match[0]), LAST.sub(rb" \1", script.encode())).decode()
    seen = LOOKED_UP.sub(lambda match: match[1] + "x" * len(match[2].encode()), script)
    seen = WITHIN_WORD.sub(lambda match: match[1] + ":" * len(match[2].encode()) if match[1] else match[0], seen)
    seen = BEHIND_HEREDOC.sub(lambda match: (match[1] or match[3]) + " " * len((match[2] or match[4]).encode()), seen)
    source = bytearray(seen.encode())
    # The parser can be stopped only where it asks for pieces. Nodes are safe to read only where it had the whole: a
    # function that fails while a node asks it for text ends the process.
    try:
        parser.parse(lambda at, _: bytes(source[at : at + 4096]), progress_callback=lambda *_: is_over())
    except ValueError:
        raise ConfigError("bash's parser finds no end; give the part that starts train.py") from None
    tree = parser.parse(source)
    source[:] = script.encode()
    lost = tree_sitter.QueryCursor(_keywords(language)).captures(tree.root_node).get("word", [])
    return tree.root_node, sorted(lost, key=lambda keyword: keyword.start_byte)


@cache
def check_version() -> None:
    """Refuse a parser that crashes; raises ConfigError where it is older than `OLDEST`."""
    installed = version("tree-sitter")
    if _numbers(installed) < _numbers(OLDEST):
        raise ConfigError(f"tree-sitter {installed} crashes while it parses; pip install 'tree-sitter>={OLDEST}'")


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)[:3]]


@cache
def _keywords(language: "Language") -> "Query":
    from tree_sitter import Query

    return Query(language, KEYWORDS)


def says(node: Node) -> str:
    """What the script says in a node, without the blanks that the parser puts in front of an expansion in quotes."""
    return (node.text or b"")[blanks_before(node) :].decode(errors="replace")


def blanks_before(node: Node) -> int:
    """How many bytes of blanks of a text in quotes the parser puts into the expansion behind them."""
    text = node.text or b""
    return len(text) - len(text.lstrip()) if node.type.endswith(("expansion", "substitution")) else 0


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


def behind_redirects(statement: Node) -> list[Node]:
    """Words of a command behind its redirects, as `--b` in `run > log --b`, which the parser puts beside the file."""
    files = (part.children_by_field_name("destination")[1:] for part in parts_of(statement, "file_redirect"))
    heredocs = (part.children_by_field_name("argument") for part in parts_of(statement, "heredoc_redirect"))
    return sorted((word for words in (*files, *heredocs) for word in words), key=lambda word: word.start_byte)


def clauses_of(node: Node) -> Iterator[tuple[list[Node], list[Node]]]:
    """Conditions and body of `if`, of each `elif`, and of `else`, which has no condition."""
    kinds = [child.type for child in node.children]
    then = 0 if node.type == "else_clause" else [*kinds, "then"].index("then")
    parts = node.children[:then], node.children[then:]
    conditions, body = ([part for part in half if part.is_named and part.type not in NO_STATEMENTS] for half in parts)
    yield conditions, body
    for child in node.children:
        if child.type in CLAUSES:
            yield from clauses_of(child)


def of_lines_before(node: Node) -> list[Node]:
    """Assignments of the lines before a command, `A=x B=y > log`, which the parser puts in front of the command.

    Where a script ends with such a line, the parser adds a command without letters.
    """
    source, before = node.text or b"", 0
    for count, (first, second) in enumerate(pairwise(node.children), 1):
        if first.type not in ("variable_assignment", "file_redirect"):
            break
        between = source[first.end_byte - node.start_byte : second.start_byte - node.start_byte]
        before = count if b"\n" in between.replace(b"\\\n", b"") or not second.text else before
    return [child for child in node.children[:before] if child.type == "variable_assignment"]


def is_cut(node: Node) -> bool:
    """Whether the parser takes a part of an assignment's value, `A=x\\$B`, for the command behind it."""
    source, start, parts = node.text or b"", node.start_byte, pairwise(node.children)
    gaps = [(first.end_byte, second.start_byte) for first, second in parts if first.type == "variable_assignment"]
    return any(not source[begin - start : end - start].replace(b"\\\n", b"") for begin, end in gaps)


def ends_early(node: Node) -> bool:
    """Whether a round of a loop may end before the end of its body."""
    is_such = node.type == "command" and says(node).partition(" ")[0] in ENDS_ROUND
    return is_such or any(map(ends_early, node.named_children))


def succeeds(statement: Node) -> bool:
    """Whether a statement cannot fail: an assignment fails where a command in it does."""
    runs = statement.type in ASSIGNMENTS and ("$(" in says(statement) or "`" in says(statement))
    return statement.type in SUCCEEDS and not runs


def is_bare(node: Node) -> bool:
    """Whether bash cuts a part of a test into words, and drops one that is empty, as `$A` in `[ -n $A ]`."""
    return re.fullmatch("[^'\"]*[$`][^'\"]*", says(node)) is not None and is_single(node)


def is_single(node: Node) -> bool:
    """Whether a node stands in a test with one bracket."""
    test = next((part for part in around(node) if part.type == "test_command"), None)
    return test is not None and says(test.children[0]) == "["


def around(node: Node | None) -> Iterator[Node]:
    """A node and all that it stands in, the nearest first."""
    while node is not None:
        yield node
        node = node.parent


def set_within(node: Node) -> Iterator[tuple[str, Node]]:
    """The variables that a statement sets in the midst of its words, as `$((A += 1))` and `${A:=b}`, and where."""
    signs, first = {part.type for part in node.children if not part.is_named}, next(iter(node.named_children), node)
    is_computed = node.type in ARITHMETIC and (first.type in ("variable_name", "subscript") or signs & {"++", "--"})
    if is_computed and signs.intersection(ASSIGNS) or node.type == "expansion" and signs & {"=", ":="}:
        yield re.split(r"\W", says(first))[0], node
    elif node.type == "subscript" and re.search(r"=|\+\+|--", says(node)):
        yield from ((name, node) for name in re.findall(r"[A-Za-z_]\w*", says(node)))
    for child in node.named_children:
        if child.type not in WITHIN_STATEMENTS:
            yield from set_within(child)


def is_apart(node: Node) -> bool:
    """Whether a statement runs in a shell of its own: in brackets, in the background, or as a part of a pipeline."""
    if node.type == "subshell" or node.next_sibling is not None and node.next_sibling.type == "&":
        return True
    is_part = node.parent is not None and node.parent.type == "pipeline"
    return is_part or node.type == "redirected_statement" and any(parts_of(node, "pipeline"))
