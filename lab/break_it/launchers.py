"""Room `launchers`: random Python launchers; Python itself says what they start, and our reader must too.

What the reader calls unsure is no fault: a word that it takes for known must be Python's own. It takes for granted that
nothing raises, so that a launcher that raises is no case.
"""

from __future__ import annotations

import random
import re
import shlex
import textwrap
from pathlib import Path
from types import SimpleNamespace

from hypothesis import strategies as st

from lab.break_it.scripts import beside, pick
from mis_plugins.errors import ConfigError
from mis_plugins.explain.launch import python
from mis_plugins.explain.launch.reader import Reading

BEGIN = """import time
from dataclasses import dataclass
from pathlib import Path
@dataclass
class Base:
    s: str = "s"
@dataclass
class C(Base):
    t: str = "c"
    def u(self, v="u"):
        return self.t + v
class K:
    def __init__(self, x):
        self.t = x
    def u(self):
        return "k"
A, B, X, Y, D, o = "a", "b", ["a"], [], {"k": "b"}, C()
p, E = o, D
def f(x, y=A):
    return x + y
def g(l):
    l.append("e")
def h():
    global A
    A = "h"
def k(x="1", *r, z="2", **q):
    return x + z
def m():
    B = "m"
    def n():
        return B
    return n()
"""
TEXTS = """'a'|'b'|'--tis'|A|B|f'{A}x'|A + 'y'|X[0]|X[-1]|' '.join(X)|D['k']|E['k']|A or 'z'|A and 'w'|o.t|p.t|o.s|
    A if A == 'a' else B|str(A)|A.strip()|f(A)|f(B, 'q')|(A := 'n')|o.u()|o.u('v')|NOW() and 'q'|A or NOW()|k(*X)|
    'v' if NOW() else A|k(A, B)|k(**D)|k(z=A)|m()|str(Path(A) / B)|'' or B|(NOW() and A) or B|f'{1 + 1}'|A.lower()"""
LISTS = """[]|['a']|[T, T]|X|Y|X + ['b']|[*X, 'c']|[A for A in X]|[x + 'd' for x in Y]|X[:1]|[T]|sorted(X)|
    [T] if C else Y|D.get('l') or [T]"""
CONDITIONS = """A == 'a'|A != B|X|not X|'a' in X|A and B|A == 'a' or B == 'b'|NOW()|not NOW()|len(X) > 1|True|False|
    A in ('a', 'b')|(A := 'n') == 'n'|A == 'a' or NOW()|not (A == 'a' and B)|A is None|o.t == 'c'"""
SIMPLE = """A = T|B = T|A += T|X = L|Y = L|X.append(T)|X.extend([T])|X.insert(0, T)|Y = X|
    X += [T, T]|D['k'] = T|D = {'k': T}|
    D.update(k=T)|E = D|pass|A, B = B, A|A, *Y = [T, T, T]|o.t = T|setattr(o, 't', T)|o = C(T)|o = C(t=T)|p = o|
    o = K(T)|
    g(X)|g(Y)|h()|A = f(T)|X[0] = T|X = Y = L|del X[0]|Y.clear()|D \\|= {'k': T}|import os as B|
    [g(X) for A in ['1']]"""
NESTED = """if C:
    S
else:
    S|if C:
    S|for A in ['1', '2']:
    S|for A in [T, T]:
    S
    if C:
        break|for B in ['1', '2']:
    if C:
        continue
    S|for A in Y + ['9']:
    S
else:
    S|i = 0
while i < 2:
    i += 1
    S|try:
    S
except ValueError:
    S|try:
    S
    raise ValueError
except ValueError:
    S|def f(x, y=B):
    S
    return x|def r():
    global B
    S
r()|match A:
    case 'a':
        S
    case B:
        S|match X:
    case [A, *_]:
        S
    case _:
        S|def r(A=A):
    if C:
        return A
    S
B = r() or B|def r():
    A = T
    def w():
        nonlocal A
        A += 'w'
    w()
    return A
B = r()"""


def filled(rng: random.Random, template: str, depth: int) -> str:
    """In a template T is a text, L a list, C a condition, and S on a line of its own a block of statements."""
    text = re.sub(r"(?m)^( *)S$", lambda found: textwrap.indent(block(rng, depth - 1), found[1]), template)
    for letter, listed in (("C", CONDITIONS), ("L", LISTS), ("T", TEXTS)):
        text = re.sub(rf"(?<![\w'.]){letter}(?![\w'(])", lambda _, listed=listed: f"({pick(rng, listed)})", text)
    return text


def block(rng: random.Random, depth: int) -> str:
    is_nested = lambda: depth > 0 and rng.random() < 0.45  # noqa: E731
    return "\n".join(filled(rng, pick(rng, NESTED if is_nested() else SIMPLE), depth) for _ in range(rng.randint(1, 3)))


def launcher_of(number: int) -> str:
    """A launcher that ends with one start of train.py."""
    rng = random.Random(number)
    given = " ".join(f"{{{pick(rng, TEXTS)}}}" for _ in range(rng.randint(1, 3)))
    return f'{BEGIN}{block(rng, 2)}\n{block(rng, 1)}\nU.execute_train(train_args=f"{given}")\n'


def cases() -> st.SearchStrategy[str]:
    return st.integers(0, 2**32).map(launcher_of)


def given_by_python(script: str) -> list[str] | None:
    """What Python gives to train.py; None where the launcher raises."""
    started: list[str] = []
    names = {"__name__": "__main__", "U": SimpleNamespace(execute_train=lambda train_args: started.append(train_args))}
    try:
        exec(compile(script, "run.py", "exec"), names | {"NOW": lambda: 1.0})
    except Exception:
        return None
    return shlex.split(started[-1]) if started else None


def judge(script: str) -> str:
    """`right`, `unsure`, `our error`, or `raises`; an AssertionError where the reader is sure of another answer."""
    theirs = given_by_python(script)
    if theirs is None:
        return "raises"
    reading = Reading(len(script.encode()), "run.py")
    try:
        found = python.launches(script, Path("run.py"), reading)
    except ConfigError:  # a function that calls itself
        return "our error"
    return beside(found, reading, theirs)
