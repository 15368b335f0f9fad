"""Rounds of the campaign, seeded by the commit, and the cases in which it found faults."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from batches import Batch, ratio_batch
from hypothesis import strategies as st
from torch import Tensor

from lab.break_it import __main__ as campaign
from lab.break_it import formulas, guided, launchers, peers, scripts
from lab.break_it.__main__ import ROOMS, tried
from mis_plugins.explain.launch import python
from mis_plugins.explain.launch.reader import Reading

READERS = {"scripts", "launchers", "dumps", "files", "memory"}
SECONDS = 300 / len(set(ROOMS) - READERS) if os.environ.get("CI") else 0
"""How long each room is tried in CI, five minutes in all. Elsewhere each has one round, and rooms of readers always."""
# Cases of a round, of other rooms 50. A case of `ranks` or `split` asks its ranks 12 times.
CASES = {"losses": 15, "weights": 25, "large": 2, "dumps": 10, "files": 5, "memory": 2, "ranks": 2, "split": 2}
READ = {
    "an export of a name in parts": ('A=b; B=A\nexport "$B=c"\npython3 train.py $A', ["c"]),
    "a default that braces set": ('X=({"${A:=b}",c})\npython3 train.py "${A:-d}"', ["b"]),
    "an output that is empty": ('A=$(echo "")\npython3 train.py "${A:=b}" x', ["b", "x"]),
    "assignments that cannot fail": ("A=b\nD=1 && export E=1 && A=a\npython3 train.py $A", ["a"]),
    "what a substitution sets stays in it": ("A=$(echo ${B:=b})\npython3 train.py $A ${B:-c}", ["b", "c"]),
    "read sets the first item of an array": ('A=(x z)\nread -r A <<< y\npython3 train.py "${A[@]}"', ["y", "z"]),
    "a test of an empty word without quotes": (
        "A=\n[ -n $A ] && B=b\n[ $A != x ] || C=c\n[ x != $A ] || D=d\n[ -z $A ] && E=e\npython3 train.py $B $C $D $E",
        ["b", "c", "d", "e"],
    ),
    "letters that the parser looks up outside its table": (
        "A={\U0010ffff\npython3 train.py $A {模型} {1..\U00031860}",
        ["{\U0010ffff", "{模型}", "{1..\U00031860}"],
    ),
    "a tabulator among letters that are no ASCII": ("python3 train.py $'é\\tx'", ["é\tx"]),
    "an array's name is its first item": ('X=(a b)\npython3 train.py "$X" $X', ["a", "a"]),
    "items are cut at blanks": ('X=("a b" "")\npython3 train.py ${X[@]} "${X[@]}"', ["a", "b", "a b", ""]),
    "a text behind an array joins its first item": ('X=(a b)\nX+=c\npython3 train.py "${X[@]}"', ["ac", "b"]),
    "a text in an array's name sets its first item": ('X=(a b)\nX=c\npython3 train.py "${X[@]}"', ["c", "b"]),
    "guarded arrays that are empty": (
        'X=()\npython3 train.py "${X[@]+"${X[@]}"}" "${1+"$@"}" ${X[@]:-} "${X[@]:-}"',
        ["", ""],
    ),
    "guarded arguments of which the first is empty": (
        'set -- "" b\npython3 train.py ${1+"$@"} ${1:+"$@"} "${1:+"$@"}"',
        ["", "b", ""],
    ),
    "an empty text is an item": ('A=\nA+=(y)\npython3 train.py "${A[@]}"', ["", "y"]),
    "two assignments in a line": ("A=1\nA=x B=c\npython3 train.py $A $B", ["x", "c"]),
    "two assignments before an export": ("A=1 B=2\nexport C=3\npython3 train.py $A $C", ["1", "3"]),
    "a line that goes on": ("A=0\nA=1 B=2 \\\npython3 train.py x$A", ["x0"]),
    "a branch that goes on": ("case a in a) A=b ;& c) A=d ;; esac\npython3 train.py $A", ["d"]),
    "a branch behind which later ones may follow": (
        'case a in a) A=b ;;& c) A=c ;; a*) A+=d ;; esac\npython3 train.py "$A"',
        ["bd"],
    ),
    "a pattern with a part in quotes": ('case a-3 in "a-"[0-9]*) A=b ;; *) A=c ;; esac\npython3 train.py $A', ["b"]),
    "a pattern that ends in quotes": ('case a in *"x") A=b ;; *) A=c ;; esac\npython3 train.py $A', ["c"]),
    "a pattern in a variable": ('B=a; case a in "$B") A=b ;; *) A=c ;; esac\npython3 train.py $A', ["b"]),
    "a star in quotes in a variable": ('B=a*; case ab in "$B") A=b ;; $B) A=c ;; esac\npython3 train.py $A', ["c"]),
    "a star behind a backslash": ("case 'a*b' in a\\*b) A=b ;; *) A=c ;; esac\npython3 train.py $A", ["b"]),
    "an assignment before a function": ("A=b\nf() { B=$A; }\nA=c f\npython3 train.py $A $B", ["b", "c"]),
    "an assignment before another shell": ("export A=b\nA=c bash -c 'python3 train.py $A'", ["c"]),
    "an assignment behind env": ("A=b\nenv A=c bash -c 'python3 train.py ${A:-d}'", ["c"]),
    "an assignment before an export": ("A=b export C=c\npython3 train.py a$C", ["ac"]),
    "arguments of another shell": ("set -- b\nbash -c 'python3 train.py ${1:-c} $0' x d", ["d", "x"]),
    "arguments of a shell that reads its input": ("bash -s -- b <<'E'\npython3 train.py ${1:-c}\nE", ["b"]),
    "a shell that has no arguments": ("set -- b\nbash -c 'python3 train.py ${1:-c}'", ["c"]),
    "a variable that another shell does not see": ("A=b\nbash <<'E'\npython3 train.py ${A:-c}\nE", ["c"]),
    "a variable that is exported later": ("A=b\nexport A\nbash -c 'python3 train.py ${A:-c}'", ["b"]),
    "a variable that is no longer exported": ("export A=b\nexport -n A\nbash -c 'python3 train.py ${A:-c}'", ["c"]),
    "all variables are exported": ("set -eau\nA=b\nbash -c 'python3 train.py ${A:-c}'", ["b"]),
    "what was set while all was exported": ("set -a; read A <<< b; set +a\nbash -c 'python3 train.py ${A:-c}'", ["b"]),
    "an export in quotes": ('A=b\nexport "A=c"\npython3 train.py $A', ["c"]),
    "another shell that exits": ("export A=b\nbash -c 'exit 1'\npython3 train.py $A", ["b"]),
    "a variable of the whole script": ("A=b\nf() { declare -g A=c; }\nf\npython3 train.py $A", ["c"]),
    "a variable of a function without a value": ("A=b\nf() { local A; A=c; }\nf\npython3 train.py $A", ["b"]),
    "a declaration outside functions": ("A=b\neval 'declare A=c'\npython3 train.py $A", ["c"]),
    "a function in a pipeline": ("A=b\nf() { A=c; }\nf 2>&1 | cat\npython3 train.py $A", ["b"]),
    "a function in the background": ("A=b\nf() { A=c; }\nf & wait\npython3 train.py $A", ["b"]),
    "a function in a pipeline behind a text": ("A=b\nf() { A=c; }\nf <<E | cat\nx\nE\npython3 train.py $A", ["b"]),
    "a function that is timed": ("A=b\nf() { A=c; }\ntime f\npython3 train.py $A", ["c"]),
    "nothing for a default": ('A=${A:-}; [[ -z "$A" ]] && A=b\npython3 train.py $A', ["b"]),
    "a comment within a command": ("python3 train.py \\\n  `# why` \\\n  b", ["b"]),
    "a format that is used again": ("python3 train.py $(printf '%s,' b c)", ["b,c,"]),
    "a list in braces": ("python3 train.py a.{b=1,c=2} '{d,e}'", ["a.b=1", "a.c=2", "{d,e}"]),
    "numbers that are compared": ("[ 10 -gt 9 ] && A=b\npython3 train.py $A", ["b"]),
    "a test that is denied": ("! [[ a == b ]] && A=b\npython3 train.py $A", ["b"]),
    "a text in a pipe to a shell": ("cat <<'E' | bash\npython3 train.py b\nE", ["b"]),
    "a shell behind another command": ("env bash <<'E'\npython3 train.py b\nE", ["b"]),
}
UNSURE = {
    "a test of two words without quotes": ("A='a b'\n[ -n $A ] && B=b\npython3 train.py c$B", ["c"]),
    "an array whose first item export sets": ("A=(x)\nexport \"A=y\"\nbash -c 'python3 train.py $A z'", ["z"]),
    "a home in an assignment behind env": ("HOME=/h\nenv B=~/x bash -c 'python3 train.py $B'", ["/h/x"]),
    "an early return": ("A=c\nf() {\n[[ $A < b ]] && return 0\nA=z\n}\nf\npython3 train.py $A", ["z"]),
    "an item that is gone": ("X=(a b)\nunset 'X[0]'\npython3 train.py \"${X[@]}\"", ["b"]),
    "items within a text": ('X=(a b)\npython3 train.py "p ${X[@]}"', ["p a", "b"]),
    "blanks within a word": ("A='a b'\npython3 train.py x$A", ["xa", "b"]),
    "other letters to cut at": ("IFS=,\nA=a,b\npython3 train.py $A", ["a", "b"]),
    "a number behind a brace and a dollar": ("set -- b\npython3 train.py {a$1 x", ["{ab", "x"]),
    "a keyword behind two assignments": ("if false; then\nA=x B=y\nelse\nA=c\nfi\npython3 train.py $A", ["c"]),
    "a number that is no condition": ("A=b\n(( 1 > 2 )) && A=a\npython3 train.py $A", ["b"]),
    "an assignment that runs a command": ("A=b\nC=$(false) && A=a\npython3 train.py $A", ["b"]),
    "the last of several commands": ("A=b\ntrue && grep -q x /dev/null && A=a\npython3 train.py $A", ["b"]),
    "a statement that fails": ("A=b\nif true; then false; fi && A=a\npython3 train.py $A", ["b"]),
    "a command before an unset": ("A=b\ngrep -q x /dev/null && unset A\npython3 train.py $A", ["b"]),
    "a command before a read": ("A=b\ngrep -q x /dev/null && read A <<< a\npython3 train.py $A", ["b"]),
    "letters to cut at before a read": ("IFS=,\nread -ra X <<< 'a b'\npython3 train.py \"${X[@]}\"", ["a b"]),
    "blanks around a line": ("read A <<< ' a '\npython3 train.py \"x$A\"", ["xa"]),
    "a backslash in a line": ("read A <<< 'a\\b'\npython3 train.py $A", ["ab"]),
    "a name that is none": ('set -- "${!B}" b\npython3 train.py x ${@:2}', ["x"]),
    "a single quote between double ones": ('python3 train.py "${A:=\'b x\'}" "$A"', ["'b x'", "'b x'"]),
    "blanks that quotes hold in a default": ('python3 train.py ${A:-"b c"}', ["b c"]),
    "nothing in quotes, for a default": ("python3 train.py ${A:-''}", [""]),
    "all arguments for a default": ('set -- "a b" c\npython3 train.py "${B:-$@}"', ["a b", "c"]),
    "all arguments in braces for a default": ('set -- "a b" c\npython3 train.py "${B:-${@}}"', ["a b", "c"]),
    "a first item that one branch empties": ('(( 1 > 2 )) && X=("")\nX+=(z)\npython3 train.py "${X:-b}"', ["z"]),
    "a status for a default": ("python3 train.py ${A:-$?}", ["0"]),
    "a home": ("HOME=/h\nA=~/x\npython3 train.py $A ~ b:~", ["/h/x", "/h", "b:~"]),
    "braces that fail": ("A=b\n{ false; } && A=a\npython3 train.py $A", ["b"]),
    "a letter behind a backslash that Python reads otherwise": ("python3 train.py $'\\x1'", ["\x01"]),
    "empty arguments that one branch sets": ('[[ $A == a ]] && set -- "" ""\npython3 train.py "b$*"', ["b"]),
    "a first item that one branch sets": ("(( 1 > 2 )) && X=(a)\nX+=(z)\nX=c\npython3 train.py ${X[@]}", ["c"]),
    "a file name longer than names may be": (f"source {'f' * 5000}\npython3 train.py a", ["a"]),
    "an array by its places": ('X=([1]=a b)\npython3 train.py "${X[@]}"', ["a", "b"]),
    "a class of letters in a pattern": ("case 5 in [[:digit:]]) A=b ;; *) A=c ;; esac\npython3 train.py $A", ["b"]),
    "an export behind an assignment in front": ("A=b\nf() { export A=d; }\nA=c f\npython3 train.py $A", ["d"]),
    "a variable that one branch exports": ("A=b; [ \"$1\" ] && export A\nbash -c 'python3 train.py ${A:-c}'", ["c"]),
    "a variable that env takes away": ("export A=b\nenv -u A bash -c 'python3 train.py ${A:-c}'", ["c"]),
    "a name for a variable": ("A=b\nf() { local -n r=$1; r=c; }\nf A\npython3 train.py $A", ["c"]),
    "a sum that declare makes": ("declare -i A=1+2\npython3 train.py $A", ["3"]),
    "an export of a name that is not known": ('A=b; B=$(date +A)\nexport "$B=c"\npython3 train.py $A', ["c"]),
    "nothing for a default of a script that may exit": (
        "A=${A:-}; if [[ $A == x ]]; then exit 1; fi\npython3 train.py a$A",
        ["a"],
    ),
    "a format with a number": ("python3 train.py $(printf '%.1f_%d' 2 007)", ["2.0_7"]),
    "letters to join at in a command's output": ('X=(a b)\npython3 train.py $(IFS=,; echo "${X[*]}")', ["a,b"]),
    "the output of two commands": ("python3 train.py $(echo a; echo b)", ["a", "b"]),
    "a pattern in quotes in a test": ('A=ab; [[ $A == "a*" ]] && B=c\npython3 train.py a$B', ["a"]),
    "a list in braces with quotes": ("python3 train.py {'a b',c}", ["a b", "c"]),
    "a range in braces": ("python3 train.py {a..c}", ["a", "b", "c"]),
    "a text that a pipe changes before a shell": ("cat <<'E' | sed s/b/c/ | bash\npython3 train.py b\nE", ["c"]),
    "a sum within a word": ("B=1\necho $((B += 1))\npython3 train.py $B", ["2"]),
    "a sum within a test": ("B=1\nif [ $((B++)) = 1 ]; then python3 train.py $B; fi", ["2"]),
    "a sum within brackets": ("B=1\n(( B > 0 && (B = 3) ))\npython3 train.py $B", ["3"]),
    "a sum within a subscript": ("B=1; X=(a b c); A=${X[B++]}\npython3 train.py $B", ["2"]),
    "a sum that cuts a text": ("B=1; A=abc; A=${A:$((B = 2))}\npython3 train.py $B", ["2"]),
    "a loop that counts": ("for ((B=0; B<2; B++)); do :; done\npython3 train.py $B", ["2"]),
    "a default in a heredoc": ("cat <<E\n${A:=b}\nE\npython3 train.py ${A:-d}", ["d"]),
    "a default in a pattern": ("[[ x == ${A:=b}* ]]\npython3 train.py ${A:-d}", ["b"]),
    "an array that one branch makes a text": (
        "A=(a b); (( 1 > 2 )) && A=c\nA=d; export A\nbash -c 'python3 train.py ${A:-e}'",
        ["e"],
    ),
    "an array by one place": ("X[1]=b; X=c; export X\nbash -c 'python3 train.py ${X:-e}'", ["e"]),
    "an array of a round that ends early": (
        "for i in 1 2; do\n(( i > 1 )) && break\nA=(a)\ndone\nA=b; export A\nbash -c 'python3 train.py ${A:-e}'",
        ["e"],
    ),
    "an export of what stands in front of a function": (
        "f() { export A; }\nA=a f\nA=b\nbash -c 'python3 train.py ${A:-c}'",
        ["b"],
    ),
    "a text that names no variable": ("A='b x'; f() { B=${!A}; C=a; }\nf\npython3 train.py a$C", ["a"]),
    "a blank between items of one branch": ('(( 1 > 2 )) && X=(a b)\nB="${X[*]}"\npython3 train.py "${B:+c}"', [""]),
    "an alternative for items of one branch": ('(( 1 > 2 )) && X=(a)\nB="${X[@]+c}"\npython3 train.py "${B:+c}"', [""]),
    "no name in braces": ('f() { X=({"${!B}",c}); C=a; }\nf\npython3 train.py a$C', ["a"]),
    "letters to cut at for one read": ('IFS=, read -ra X <<< "a,b"\npython3 train.py "${X[@]}"', ["a", "b"]),
}
START = '\nU.execute_train(train_args=f"--a {A}")\n'  # of a launcher
READ_LAUNCHERS = {
    "two names of a dict": "d = {'a': 'b'}\ne = d\ne['a'] = 'c'\nA = d['a']",
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
UNSURE_LAUNCHERS = {
    "a text or what only running tells": "A = (NOW() and 'q') or 'b'",
    "a list with an item more at its start": "X = ['b']\nX.insert(0, 'a')\nA = X[0]",
    "a list without an item": "X = ['a', 'b']\ndel X[0]\nA = X[0]",
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


@pytest.mark.parametrize("name", ROOMS)
def test_rounds_find_no_fault(name: str, own_recorder: None) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout
    until = time.monotonic() + SECONDS
    for number in itertools.count(int(commit[:8] or "0", 16)):
        assert sum(tried(name, number, CASES.get(name, 50)).values())
        if time.monotonic() > until or name in READERS:
            break
    assert "miles" not in sys.modules, "a room's stand-in for a host would be the host of the next room too"


def test_several_processes_answer_as_one_does() -> None:
    one, two = (list(campaign.in_order("baselines", range(2), processes)) for processes in (1, 2))
    assert one == two and len(two) == 2


def test_a_fault_ends_a_run_that_keeps_what_was_answered_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answers(name: str, number: int) -> Counter[str]:
        assert (name, number) != ("losses", 3), "planted"
        return Counter(right=100)

    monkeypatch.setattr(campaign, "RECORD", record := tmp_path / "break_it.json")
    monkeypatch.setattr(campaign, "tried", answers)
    assert campaign.main(["--record", "--minutes", "1", "--seed", "2", "--room", "weights", "losses"]) == 1
    assert "again: bash scripts/break-it.sh --room losses --seed 3" in capsys.readouterr().out
    rooms = json.loads(record.read_text())["rooms"]
    assert {name: (one["seeds"], one["answers"]) for name, one in rooms.items()} == {
        "weights": (4, {"right": 200}),
        "losses": (3, {"right": 100}),
    }


@pytest.mark.parametrize("name", READ | UNSURE)
def test_a_script_is_read_as_bash_reads_it_or_not_at_all(name: str) -> None:
    script, given = (READ | UNSURE)[name]
    assert scripts.given_by_bash(script) == given
    assert scripts.judge(script) == ("unsure" if name in UNSURE else "right")


@pytest.mark.parametrize("name", READ_LAUNCHERS | UNSURE_LAUNCHERS)
def test_a_launcher_is_read_as_python_runs_it_or_not_at_all(name: str) -> None:
    script = (READ_LAUNCHERS | UNSURE_LAUNCHERS)[name] + START
    assert launchers.judge(script) == ("unsure" if name in UNSURE_LAUNCHERS else "right")


def test_a_launcher_that_exits_starts_nothing() -> None:
    script = "import sys\nsys.exit(0)\nA = 'a'" + START
    reading = Reading(len(script), "run.py")
    assert python.launches(script, Path("run.py"), reading) == []
    assert reading.ended.endswith("exits in line 2")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="atheris has no wheel for this processor")
@pytest.mark.parametrize("target", ["launchers", "config"])
def test_atheris_feeds_a_reader(target: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("break\n")
    assert guided.main([target, "--again", str(kept)]) == 0


@pytest.mark.parametrize(("ended", "status"), [(0, 0), (70, 1), (71, 1), (77, 1), (1, 2), (-9, 2)])
def test_the_status_tells_a_fault_from_a_run_that_failed(ended: int, status: int) -> None:
    """libFuzzer ends with 77 behind an exception, and with 70 behind an input that takes too long."""
    with patch.object(subprocess, "run", return_value=subprocess.CompletedProcess([], ended)) as run:
        assert guided.main(["config", "--minutes", "0"]) == status
    assert "-max_total_time=1" in run.call_args.args[0], "0 would have no end"


def weighed(x: peers.Given, target: Tensor, most: float = 2.0) -> tuple[Tensor, float]:
    """A loss that truncates ratios at 2, and takes one that is not known for 1."""
    ratio = (x.proximal - x.behavior).exp().clamp(max=most)
    return -(ratio.nan_to_num(1.0) * x.token_advantages * target * x.mask).sum(), 1.0


def refuses(message: str) -> tuple[Tensor, float]:
    raise ValueError(message)


def endless() -> tuple[Tensor, float]:
    while True:
        pass


PLAIN, UNKNOWN = ratio_batch([[3.0, 0.5], [1.0]], [[1, 1], [0]]), ratio_batch([[3.0, 0.5]])
UNKNOWN.behavior[0][1] = math.nan
ANSWERS: dict[str, tuple[Batch, Callable[[peers.Given, Tensor, None], tuple[Tensor, float]]]] = {
    "right": (PLAIN, lambda x, target, _: weighed(x, target)),
    "wrong": (PLAIN, lambda x, target, _: weighed(x, target, most=1.9)),
    "NaN": (PLAIN, lambda x, target, _: (weighed(x, target)[0] * math.nan, 1.0)),
    "refused": (PLAIN, lambda *_: refuses("no such batch")),
    "crash": (PLAIN, lambda x, target, _: (target.sum() * (1 // 0), 1.0)),
    "hang": (PLAIN, lambda *_: endless()),
    "trains on the unknown": (UNKNOWN, lambda x, target, _: weighed(x, target)),
}


@pytest.mark.parametrize("wanted", ANSWERS)
def test_a_package_is_judged_by_its_own_formula(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LIMIT_S", 0.5)
    batch, loss = ANSWERS[wanted]
    truncates = formulas.of_trl("token_truncate", 2.0, 0.0)
    package = peers.Package(st.none(), lambda said: truncates, loss, lambda said: {}, lambda said: "token")
    signs = torch.tensor(peers.SIGNS[: len(batch.prompts)])
    assert peers.answer(package, peers.Given(batch, [], signs), None) == wanted
