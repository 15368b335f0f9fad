"""Room `scripts`: random bash programs that start train.py; bash itself says what it is given, and our reader must too.

What the reader calls unsure is no fault: a word that it takes for known must be bash's own.
"""

from __future__ import annotations

import random
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from mis_plugins.explain.launch import bash
from mis_plugins.explain.launch.reader import Launch, Reading

PLAIN = "--tis 1.5 mis.yaml a b a=b x/y.yaml -v {模型 {1..\U00031860 {\U0010ffff} é/模.yaml ~/x".split()
USES = """$A ${A} ${A:-b} ${A-b} ${A:+b} ${A:=b} ${A%.yaml} ${A#*/} ${A##*/} ${A/a/c} ${A//a/c} ${#A} ${A^^}
     ${A:1} ${A:0:2}
    ${!A} ${X[0]} ${X[1]} ${X[@]} ${X[*]} ${#X[@]} ${X[@]:1} $X $((1+2)) ${X[-1]} $# $1 $@ $* ${A+set} ${A%/*}
     ${X[@]/a/b}
    ${X[@]:-b} ${1:-b} ${A:-$B} ${A:-"$B"} ${@:2} ${A//\\//_} ${X[@]%.yaml} ${A:-$@} ${A:-$#} ${A:-~/b}
    ${A:-'$B'} ${A:-"${X[@]}"} ${A-"$@"} ${A:-b"$B"} ${A:+"$A"} ${A:-b\\$B} ${A:="$B"} ${X[@]+"${X[@]}"} ${1+"$@"}
    ${A:+-v} ${A#*=} ${A:-["a"]} ${1:-} ${X[@]:-} ${*:-b} ${*:+b}""".split()
CONDITIONS = """[ "$A" = a ]|[[ $A == b ]]|[[ $A == a* ]]|[[ -n $A ]]|[ -z "$A" ]|[[ ! $A != b ]]|true|false|
    [[ $A == a && -n $B ]]|
    [ "${A:-a}" = a ]|[[ ${#A} -gt 2 ]]|(( ${#A} > 2 ))|[[ $A =~ ^a ]]|test "$A" != b|! [ -n "$A" ]|
    [ $# -gt 0 ]|
    [[ -z $A || $A = b ]]|[ -n $A ]|[[ -v A ]]|[ "$A" ]|[[ $A == "a*" ]]|[ "$A" = a -o "$B" = b ]|
    [[ $A < b ]]|[ -n "$A" ] && [ "$B" = a ]|[ -z "$A" ] \\|\\| [ "$B" = a ]"""
SIMPLE = """A=W|A=W|export A=W|A+=W|X=(W W)|X+=(W)|X[1]=W|unset A|unset 'X[0]'|set -- W W|: ${A:=P}|eval 'A=P'|
    (A=W)|A=W true|
    read -r A <<< "P P"|read -ra X <<< "P P"|A=$(cat <<E\nP $B\nE\n)|shift|echo W \\| read -r A|declare A=W|
    printf -v A '%s' P|
    X=("${X[@]}" W)|unset X|X=()|A=|mapfile -t X <<< P|[ -n "$A" ] && A=W|A=$B|A=$(echo W)|A=`echo W`|A="$A W"|
    X=($A)|readonly A|readonly A=W|declare -i A|declare -i A=2|declare -i A; read A <<< P|
    declare -i A; export A=W|declare -i A; for A in W 1+1; do :; done|readonly A; for A in W; do :; done|
    readonly A; read A <<< P|A=W >/dev/null|time A=W|mapfile X <<< P|mapfile -d , -t X <<< a,b|trap 'A=W' ERR; false|
    A=(W)|declare -a X=(W W)|set -- "$@" W|A=${X[*]}|IFS=, A=W|eval "A=$B"|B=A|A=$'P\\tx'|export B|X=([1]=W)|
    X+=W|A="${A} P"|h() { A=W; }; A=P h|h() { B=$A; export A; }; A=W h|declare -g A=W|declare A; A=W|
    declare -x A=W|export -n A|set -a|set +a|h() { A=W; }; h & wait|
    h() { X+=(W); }; h \\| cat|{ A=W; } \\| cat|B=$(IFS=,; echo "${X[*]}")|
    X=({W,P})|[ ${#X[@]} -gt 1 ] && A=W|export "A=P"|A=$(printf '%s_' P P)|
    unset A B|readonly Z=1; A=W|A=$((1+1))|let A=2|A=P B=W|: "${A:=W}"|read A B <<< "P P"|
    [[ $A == a ]] \\|\\| A=W|grep -q x /dev/null && A=W|B=$(false) && A=W|{ false; } && A=W|
    read -r -d '' A <<'E'\nP  P\nE|mapfile -t X <<E\nP $B\nP\nE|read A B <<E\nP P\nE|p() { echo P; }; B=$(p)|
    A=$((B+=1))|: $((B++))|(( 1 > 0 && (A=3) ))|A=${X[B++]}|for ((A=0; A<2; A++)); do :; done|
    true && grep -q x /dev/null && A=W|B=W && A=W|export B=W && A=W|! grep -q x /dev/null && unset A|
    grep -q x /dev/null \\|\\| set -- W|(exit 1) && read -r A <<< P|(( 1 > 2 )) \\|\\| X=(W)"""
NESTED = """if C; then\nS\nelse\nS\nfi|if C; then\nS\nfi|for A in W W; do\nS\ndone|
    case $A in a*\\|b) S ;; *) S ;; esac|
    f() {\nS\n}\nf W|f() {\nlocal A=W\nS\n}\nf|C && {\nS\n}|C \\|\\| {\nS\n}|{\nS\n}|(\nS\n)|
    for i in 1 2; do\nS\n[ $i = 1 ] && continue\nS\ndone|while true; do\nS\nbreak\ndone|
    f() {\nC && return 0\nS\n}\nf W|
    if C; then\nS\nelif C; then\nS\nfi|for A in "${X[@]}"; do\nS\ndone|for ((i=0; i<2; i++)); do\nS\ndone|
    f() {\nA=$1\nS\n}\nf W W|case $A in a) S ;& b) S ;; esac|until C; do\nS\nbreak\ndone|f() { A=W; }\nB=$(f)|
    while [ $# -gt 0 ]; do\nA=$1\nshift\nS\ndone|
    while [[ $# -gt 0 ]]; do\ncase $1 in a*) A=${1#*=} ;; b) B=W; shift ;; *) break ;; esac\nshift\ndone|
    g() {\nS\n}|h() {\nS\nB="$A x"\n}\nA=W B=W h W|
    case $A in "a"*\\|'b') S ;;& *"b"*) S ;& a\\*) S ;; "$B") S ;; *) S ;; esac"""
STARTS = """T W|T W|T W|T W|bash -c 'T ${A:-P} $B $1' _ W|A=W bash -c 'T ${A:-P} "$B"'|env B=W bash -c 'T ${B:-P} $A'|
    bash -s W <<'E'\nT ${A:-P} "$1" $2\nE|bash <<E\nT ${A:-P} $B\nE|t() { T ${A:-P} $B $1; }\nA=W t W|
    export A\nbash -c 'A=P; bash -c "T $A \\$A $B"'|T W \\\n  `# why` \\\n  W"""


def pick(rng: random.Random, listed: str) -> str:
    """One of the templates that `|` separates; `\\|` is a bar within a template."""
    return rng.choice(re.split(r"(?<!\\)\|\s*", listed)).strip().replace("\\|", "|").replace("\\n", "\n")


def word(rng: random.Random) -> str:
    """One word of a command as a script spells it: it may expand to several, or to none."""
    plain, use = rng.choice(PLAIN), rng.choice(USES)
    quoted = [f"'{plain} x'", f'"{plain}"', f'"{use}"', f'"{plain} {use}"', f'"{use}  {use}"', '""']
    spelled = [plain, plain, use, f"{plain}{use}", *quoted]
    return rng.choice(spelled).replace("A", rng.choice("AB")) if "A" in use else rng.choice(spelled)


def block(rng: random.Random, depth: int) -> str:
    """A few statements; in a template T starts train.py, C is a condition, S statements, W a word and P a plain one."""
    nested = (depth and rng.random() < 0.4 for _ in range(rng.randint(1, 3)))
    return "\n".join(filled(rng, pick(rng, NESTED if is_nested else SIMPLE), depth) for is_nested in nested)


def filled(rng: random.Random, text: str, depth: int) -> str:
    fill = {"C": lambda: pick(rng, CONDITIONS), "S": lambda: block(rng, depth - 1), "W": lambda: word(rng),
            "P": lambda: rng.choice(PLAIN)}  # fmt: skip
    return re.sub(r"(?<![\w$])[CSWP](?!\w)", lambda found: fill[found[0]](), text)


def script_of(number: int) -> str:
    """A script that ends with one start of train.py."""
    rng = random.Random(number)
    start = filled(rng, pick(rng, STARTS), 0).replace("T ", "python3 train.py ")
    return f"{block(rng, 2)}\n{block(rng, 1)}\n{start}\n"


def cases() -> st.SearchStrategy[str]:
    return st.integers(0, 2**32).map(script_of)


def given_by_bash(script: str, program: str = "python3") -> list[str] | None:
    """What bash gives to a program behind its first argument, as train.py is; None where the script fails."""
    shim = f"{program}() {{ shift; printf '%s\\0' x \"$@\" >&9; }}\nexport -f {program}\n"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["bash", "--norc", "-c", f"ulimit -t 5; exec 9>&1 >/dev/null 2>&1\n{shim}{script}", "s"], cwd=folder,
            env={"PATH": "/usr/bin:/bin"}, capture_output=True, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    said = done.stdout.decode(errors="replace")
    return said.removesuffix("\0").split("\0")[1:] if done.returncode == 0 and said.count("x\0") >= 1 else None


def judge(script: str) -> str:
    """`right`, `unsure`, or `no start`; an AssertionError where the reader is sure of what bash does not give."""
    theirs = given_by_bash(script)
    if theirs is None:
        return "no start"
    reading = Reading(len(script.encode()), "s.sh")
    return beside(bash.launches(script, Path("s.sh"), reading), reading, theirs)


def beside(found: Sequence[Launch], reading: Reading, theirs: list[str]) -> str:
    """`unsure`, or `right` where the reader is sure of the words that the script itself gives."""
    is_sure = found and all(
        not one.branch and all(word.is_known and not word.branch for word in one.words) for one in found
    )
    if not is_sure or reading.unread:
        return "unsure"
    ours = [word.text for word in found[-1].words]
    assert ours == theirs, f"read {ours}, and the script gives {theirs}"
    return "right"
