"""Python launchers that Python and our reader must read alike, or our reader not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.break_it import launchers
from mis_plugins.explain.launch import python
from mis_plugins.explain.launch.reader import Reading

START = '\nU.execute_train(train_args=f"--a {A}")\n'
READ = {
    "a loop that breaks": "A = 'x'\nfor b in ['1', '2', '3']:\n    if b == '2':\n        break\n    A = b",
    "a round that is left": "A = ''\nfor b in ['1', '2']:\n    if b == '1':\n        continue\n    A += b",
    "a loop with else": "for b in ['1']:\n    pass\nelse:\n    A = b + 'e'",
    "a name within brackets": "A = 'a'\nB = [A for A in ['b']]",
    "two names of a list": "X = Y = ['a']\nX.append('b')\nA = '-'.join(Y)",
    "a list that a function gets": "def f(l):\n    l.append('b')\nX = ['a']\nf(X)\nA = '-'.join(X)",
    "a list of the outer function": (
        "def f():\n    X = ['a']\n    def g():\n        X.append('b')\n    g()\n    return X[-1]\nA = f()"
    ),
    "a list that is added to in place": "X = ['a']\nY = X\nY += ['b']\nA = '-'.join(X)",
    "a list as a default": "def f(l=[]):\n    l.append('b')\n    return l\nf()\nA = '-'.join(f())",
    "arguments from a dict": "def f(a='q', b='x'):\n    return a + b\nA = f(**{'b': 'y'})",
    "more arguments than parameters": "def f(a, *rest, b='x'):\n    return a + b + rest[0]\nA = f('1', '2')",
    "a default from where the function is made": "A = 'a'\ndef f(y=A):\n    return y\nA = 'b'\nA = f()",
    "a name of the whole launcher": "A = 'a'\ndef f():\n    global A\n    A = 'b'\nf()",
    "a name of the function around": (
        "A = 'a'\ndef f():\n    A = 'b'\n    def g():\n        nonlocal A\n        A += 'c'\n    g()\n    return A\n"
        "A = f()"
    ),
    "a path from the root": "from pathlib import Path\nA = Path('/a') / '/b'",
    "a path with what says nothing": "from pathlib import Path\nA = Path('a//') / './b'",
    "a name in a condition": "A = 'a'\nif (A := 'b'):\n    pass",
    "a name in a pattern": "A = 'a'\nmatch 'q':\n    case A:\n        pass",
    "an object that is made by code": "class C:\n    def __init__(self, x):\n        self.x = x + '1'\nA = C('q').x",
    "fields that are inherited": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: str = '0'\n@dataclass\nclass C(P):\n"
        "    y: str = '1'\nA = C('q').x"
    ),
    "a method without an object": "class C:\n    @staticmethod\n    def f(x):\n        return x\nA = C().f('q')",
    "an attribute by its name": "class C:\n    x: str = '0'\nc = C()\nsetattr(c, 'x', '1')\nA = c.x",
    "an object that a handler changes": (
        "class C:\n    x: str = '0'\nc = d = C()\ntry:\n    raise ValueError\nexcept ValueError:\n    c.x = '1'\n"
        "    c = C()\nA = d.x"
    ),
    "a number and its text as keys": "d = {1: 'a', '1': 'b'}\nA = d[1]",
}
UNSURE = {
    "a text or what only running tells": "A = (NOW() and 'q') or 'b'",
    "a list with an item more at its start": "X = ['b']\nX.insert(0, 'a')\nA = X[0]",
    "a list without an item": "X = ['a', 'b']\ndel X[0]\nA = X[0]",
    "two names of a dict": "d = {'a': 'b'}\ne = d\ne['a'] = 'c'\nA = d['a']",
    "one of two lists": "X, Y = ['a'], ['a']\nZ = X if NOW() else Y\nZ.append('b')\nA = X[-1]",
    "two names of a list after a branch": "X = Y = ['a']\nif NOW():\n    X.append('b')\nY.insert(0, 'z')\nA = X[0]",
    "one of two objects": "class C:\n    x: str = '0'\nc, d = C(), C()\np = c if NOW() else d\np.x = '1'\nA = c.x",
    "what a function does before it returns early": (
        "A = 'a'\ndef f():\n    global A\n    if NOW():\n        return\n    A = 'b'\nf()"
    ),
    "an exception that may be raised, and is caught": (
        "A = 'x'\ntry:\n    if NOW():\n        raise ValueError\nexcept ValueError:\n    A = 'y'"
    ),
    "one of several handlers": (
        "try:\n    raise ValueError\nexcept TypeError:\n    A = 'b'\nexcept ValueError:\n    A = 'c'"
    ),
    "a list of unknown rounds": "A, b = 'x', 'x'\nfor q in sorted(['1', '2']):\n    A = b\n    b = 'c'",
    "a break of which nothing is known": "A = 'x'\nfor b in ['1', '2']:\n    if NOW():\n        break\n    A = b",
    "a pattern with a rest": "match ['a']:\n    case ['a', *_]:\n        A = '1'\n    case _:\n        A = '2'",
    "a function that another one replaces": "def d(f):\n    return lambda: 'z'\n@d\ndef f():\n    return 'a'\nA = f()",
    "all names at once": "A = 'a'\nexec(\"A = 'b'\")",
    "an import of a name": "A = 'a'\nfrom os import sep as A",
    "arguments that only running tells": "A = 'a'\nU.execute_train(**dict(train_args='b'))",
}


@pytest.mark.parametrize("name", READ | UNSURE)
def test_a_launcher_is_read_as_python_runs_it_or_not_at_all(name: str) -> None:
    assert launchers.judge((READ | UNSURE)[name] + START) == ("unsure" if name in UNSURE else "right")


def test_a_launcher_that_exits_starts_nothing() -> None:
    script = "import sys\nsys.exit(0)\nA = 'a'" + START
    reading = Reading(len(script), "run.py")
    assert python.launches(script, Path("run.py"), reading) == []
    assert reading.ended.endswith("exits in line 2")
