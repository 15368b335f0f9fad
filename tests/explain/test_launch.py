"""Launch scripts: what is told of them, the diff, and the weights of the job that the changed script starts."""

import math
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import oracle
import pytest
from batches import ratio_batch
from launchers import FLAT, HOOK, PYTHON, THEIRS, parsed, shell, started

from mis_plugins import mis
from mis_plugins.__main__ import main
from mis_plugins.explain.launch import bash, python
from mis_plugins.explain.launch.reader import Reading
from mis_plugins.explain.launch.words import HOLE, Word
from mis_plugins.shared import budget

PRESET = '"$(python -m mis_plugins config path tis)"'
STEP = "--custom-megatron-before-train-step-hook-path mis_plugins.mis.report_step"
OURS = f"--custom-tis-function-path {HOOK}\n{STEP}\n--custom-config-path {PRESET}"
WATCHES = "tis_upper_bound: 2.0\n"  # a config without use_tis
UNSWITCHED = f"--custom-tis-function-path {HOOK}\n--custom-config-path mis.yaml"
NEVER = "called: never: neither --use-tis nor --get-mismatch-metrics is set"
ORACLE = {"weight": {"level": "token", "bound": "truncate", "upper": 2.0}}


def words(script: str) -> list[Word]:
    """The words of the one start of a script, which is given `--seed 7`; it is in Python where it calls `U`."""
    is_python = "U." in script or "import" in script
    reader, path = (python, Path("run.py")) if is_python else (bash, Path("run.sh"))
    (launch,) = reader.launches(script, path, Reading(len(script), "run"), ["--seed", "7"])
    return list(launch.words)


def texts(script: str) -> list[str]:
    return [word.text for word in words(script)]


def check(capsys: pytest.CaptureFixture[str], folder: Path, name: str, script: str, *arguments: str) -> tuple[int, str]:
    (folder / name).write_text(script)
    code = main(["config", "check", str(folder / name), *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def assert_corrects(argv: list[str]) -> None:
    """The parsed command makes the hook give the oracle's weights, which are not 1."""
    batch = ratio_batch([[0.5, 3.0], [1.2], [0.9, 4.0]])
    args = parsed(argv)
    assert args.use_tis and args.custom_tis_function_path == HOOK
    loss, _, _ = mis.compute_mis_weights_with_cp(args=args, **batch.hook_kwargs())
    weights = (loss / batch.pg_loss()).tolist()
    expected = [weight for row in oracle.correct(batch.samples, ORACLE).weights for weight in row]
    assert weights == pytest.approx(expected, rel=1e-6) and not all(math.isclose(one, 1) for one in weights)


def test_an_array_whose_items_may_all_be_none_gives_no_alternative_for_sure() -> None:
    assert not words("X=($A $B)\npython3 train.py ${X[@]:+--lr}")[0].is_known


def test_all_arguments_in_one_word_have_a_default_only_where_there_are_none() -> None:
    assert texts("set -- x 'y z'\npython3 train.py \"${*:-b}\" ${*:+c}") == ["x y z", "c"]
    assert texts("set --\npython3 train.py ${*:-b} ${@:-d}") == ["b", "d"]


@pytest.mark.parametrize("sets", ["read 'X[0]' <<< c", "printf -v 'X[0]' c"])
def test_an_item_that_a_command_sets_is_not_known(sets: str) -> None:
    assert not words(f"X=(a b)\n{sets}\npython3 train.py $X")[0].is_known


@pytest.mark.parametrize("sets", ["read A <<< 1+1", "export 'A=1+1'", "for A in 1+1; do :; done"])
def test_a_sum_for_an_integer_is_not_known(sets: str) -> None:
    assert not words(f"declare -i A\n{sets}\npython3 train.py $A")[0].is_known


AROUND = """import copy, dataclasses, functools, helper, json, os, random
@dataclasses.dataclass
class C:
    t: str = 't'
    def u(self): self.t = 'u'
def g(): X.append('g')
X, Y, o = ['a'], ['b'], C()
D, Z = {{'k': Y}}, [X, Y]
{}
U.execute_train(' '.join(X) + ' ' + ' '.join(Y) + ' ' + o.t)"""


@pytest.mark.parametrize(
    "line",
    ["random.shuffle(X)", "helper.f(args=X)", "W = X; helper.f(W)", "helper.f(Z[0])", "helper.f([X])", "helper.f(**D)",
     "helper.f(o)", "vars(o)['t'] = 'n'", "object.__setattr__(o, 't', 'n')", "o.__dict__['t'] = 'n'", "helper.o.x = X",
     "functools.partial(X.append, 'n')()", "add = X.append; add('n')", "getattr(X, 'append')('n')", "helper.f(o.u)",
     "list.append(X, 'n')", "C.u(o)", "Z[N].append('n')", "Z[:1][0].append('n')", "D[N].append('n')",
     "list(Z)[0].append('n')", "dict(a=X)['a'].append('n')", "copy.copy(Z)[0].append('n')", "(N and X).append('n')",
     "W = {}; W[N] = X; W['a'].append('n')", "W = {N: X}; W[0].append('n')", "(Z * 2)[0].append('n')",
     "a, *b = Z; b[0].append('n')", "for w in D.values(): w.append('n')", "for n, w in enumerate(Z): w.append('n')",
     "[w.append('n') for w in Z if w]", "{w: X.append('n') for w in 'ab'}", "assert X.append('n') is None",
     "match Z:\n  case [w, *_]: w.append('n')", "g(); helper.f(g)", "{1: g}[N]()", "(lambda a=1: X.append('n'))()",
     "list(map(X.append, 'nm'))", "list(map(lambda w: w.append('n'), Z))", "from helper import len; len(X)",
     "import helper as os; os.f(X)", "print = helper.f; print(X)", "1 < 2 < (X.append(1) or 3)",
     "W = []\nif N: W = []\nW.clear(); helper.f(X)",
     "class K(C):\n  def u(self): super().u()\no = K(); o.u()", "class K:\n  L = X\nK.L.append('n')",
     "def mk():\n  L = ['p']\n  def add(): L.append('n')\n  def get(): return L\n  return [add, get]\n"
     "b, c = mk(); b(); Y = c()", "class K:\n  p = property()\n  @p.setter\n  def p(self, v): X.append(v)\nK().p = X"],
)  # fmt: skip
def test_what_a_function_may_change_out_of_sight_is_not_known(line: str) -> None:
    found = words(AROUND.format(line))
    assert [word.text for word in found] != ["a", "b", "t"] or any(word.branch for word in found)


def test_a_function_that_leaves_alone_what_it_is_given_is_known_to() -> None:
    lines = "print(X); len(X); sorted(X); json.dumps(D); os.path.join('a', *X); D['j'] = X; D.get('k'); str(Y); repr(o)"
    behind = "D['k'].append(D['j'][0] + getattr(o, 't')); o.f = g; o.f()"
    assert texts(AROUND.format(f"{lines}\n{behind}")) == ["a", "g", "b", "at", "t"]


CASES = {
    "nothing of ours": (FLAT, shell(), ()),
    "the host's example": (
        FLAT, shell("--use-tis", f"--custom-config-path mis.yaml\n--custom-tis-function-path {THEIRS}"), ()
    ),
    "a config that does not exist": (
        FLAT, shell("--use-tis", f"--custom-config-path missing.yaml\n--custom-tis-function-path {HOOK}"), ()
    ),
    "neither flag": (WATCHES, shell("", UNSWITCHED), ()),
    "a launcher with nothing": (FLAT, PYTHON, ()),
    "a launcher with a BOM": (FLAT, f"\ufeff{PYTHON}", ()),
    "a launcher with its own config": (FLAT, PYTHON, ("--enable-mis",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_changed_script_starts_a_job_that_corrects(case: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, script, given = CASES[case]
    name = "run.py" if "import" in script else "run.sh"
    (tmp_path / "mis.yaml").write_text(config)
    code, told = check(capsys, tmp_path, name, script, *(("--", *given) if given else ()))
    assert code == 1
    done = subprocess.run(["patch", "-p0", "-d", str(tmp_path)], input=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    code, told = check(capsys, tmp_path, name, (tmp_path / name).read_text(), *(("--", *given) if given else ()))
    assert code == 0 and told.endswith("nothing has to change\n")
    assert_corrects(started(tmp_path / name, tmp_path, *given))


UNREAD = (
    shell().replace("ray job", "source /nowhere/model.sh\nray job").replace("${CUSTOM", "${MODEL_ARGS[@]} ${CUSTOM")
)
SWITCHED = shell("", UNSWITCHED).replace(
    "ray job", "if [ $MODE = watch ]; then GRPO_ARGS+=(--get-mismatch-metrics); fi\nray job"
)
OWN_LOSS = shell("--use-tis", f"{OURS}\n--loss-type custom_loss\n--custom-loss-function-path mine.loss")
ESCAPES = shell("--use-tis", "--custom-tis-function-path x\x1b[31m.y\n--custom-config-path \x1b[2Jz")
GIVEN = ("--", "--extra-args", "--use-tis --custom-tis-function-path x.y", "--upper", "3", "--enable-mis")


FULL = f"--use-tis --custom-tis-function-path {HOOK} {STEP} --custom-config-path mis.yaml"
MIS = "use_tis: true\nmis: {weight: {level: token, upper: 2}}\n"
KEPT = "use_tis: true\nmis: {weight: {}, denominator: kept, reject: [{statistic: ratio, upper: 2}]}\n"
SFT, NO_LOSS = "python3 train.py --loss-type sft_loss\n", "sft_loss (line 1) runs in place of the host's policy loss"
ARMS = f"for arm in a b; do if [ $arm = b ]; then E='{FULL}'; else E=''; fi; python3 train.py --lr 1 $E; done"
TYPER = f"""import typer
import miles.utils.external_utils.command_utils as U


def main(mis: bool = True, extra: str = "", upper: int = 2):
    U.execute_train(train_args=("{FULL} " if mis else "") + extra)


typer.run(main)
"""
NO_METRIC = "nothing is corrected, and its log has no mis_ metric"
IN_OUT = shell("--use-tis", f"--custom-config-path $OUT/mis.yaml\n--custom-tis-function-path {HOOK}")
TWICE, NONE = "the host's surrogate compares with the engine's log-probs already", "nothing has to change"
START = f"import subprocess\nimport miles.utils as U\nU.execute_train(train_args='{FULL}')\n"
WRITTEN = "import miles.utils as U\np = '/none/own.yaml'\n{}\nU.execute_train(train_args=f'" + FULL.replace(
    "mis.yaml", "{{p}}') "[:-1]
)
SURE = "the script writes it, with parts that are not known"
BRANCHED = 'CMD=\'python3 train.py --colocate\'\nif [ $A = 1 ]; then CMD="$CMD {}"; fi\neval "$CMD"'
TOLD = [
    # the file of the config, the script (Python where it imports), how it is checked, the exit code, and what is told
    (WATCHES, shell("", UNSWITCHED), (), 1, NEVER, NO_METRIC),
    (None, PYTHON, (), 1, NEVER, NO_METRIC),
    (None, shell("", OURS), (), 0, NONE),  # a preset switches the correction on by itself
    (WATCHES, shell("--get-mismatch-metrics", UNSWITCHED), (), 0, "by --get-mismatch-metrics (line 7)"),
    (None, shell("--use-tis", OURS), ("--preset", "metrics-only"), 1,
     "-   --use-tis", "+   --get-mismatch-metrics", PRESET.replace("tis)", "metrics-only)")),
    *((None, shell("", OURS).replace("ray job", f"if {test}; then GRPO_ARGS+=(--use-tis); fi\nray job"), (), 2,
       f"--use-tis (line 13): there only if this holds: {test}", "nothing is proposed as long as that is unsure")
      for test in ('[ "$1" = x ]', "[[ -n $HOST ]]", "grep -q x file", '[[ "$A" == c* || x == y ]]')),
    (None, PYTHON, GIVEN, 1, "capped at 3", "x.y (given on the command line"),
    (None, PYTHON, ("--", "--upper", "high"), 2, "--upper: got 'high'; expected a number"),
    (None, OWN_LOSS, (), 2, "mine.loss runs in place of the host's policy loss"),
    (WATCHES, SWITCHED, ("--", "MODE=watch"), 0, NONE),
    (WATCHES, SWITCHED, ("--", "MODE=train"), 1, NEVER),
    (None, UNREAD, (), 1, "not read: line 10: source /nowhere/model.sh: the file is not here",
     "${MODEL_ARGS[@]} may give more flags"),
    (None, shell().replace('a model" \\', 'a model"'), (), 1, "does the line above lack its backslash?"),
    (None, shell("--use-tiss"), ("--host", "slime"), 1,
     "warning: --use-tiss (line 7): no flag of slime where its parser was recorded"),
    (None, ESCAPES, (), 1, r"x\x1b[31m.y"),
    *((None, f"python3 train.py {flags}\n", (), 1, f"starts: train.py of {host} (line 1)") for flags, host in (
        ("--vllm-gpu-memory-utilization 0.7", "vime"),
        ("--train-memory-margin-bytes 1 --sglang-mem-fraction-static 0.7", "Miles"),
        ("--rollout-sample-hook-path a.b --custom-advantage-function-path c.d", "slime"),
        ("--custom-advantage-function-path c.d", "Miles, slime or vime"),
        ("--lr 1e-6 --no-such-flag", "Miles, slime or vime"),
        ("--vllm-gpu-memory-utilization 0.7 --sglang-mem-fraction-static 0.7", "Miles, slime or vime"),
    )),
    *((None, script, (), 1, "no diff: lines end in CR LF, or hold") for script in (
        "import miles.utils as U\r\nU.execute_train('--lr 1')\r\n", "# a\x0cb\npython3 train.py --lr 1\n",
    )),
    (None, "# a\npython3 train.py --lr 1\r\n", (), 2, "line 2: bash takes a CR or BOM for a letter of a word"),
    (None, "\ufeffpython3 train.py --lr 1\n", (), 2, "line 1: bash takes a CR or BOM for a letter of a word"),
    (MIS, f"readonly A=1\nA=2\npython3 train.py $A {FULL}", (), 0, "line 2: A=2: bash refuses it, since A is readonly"),
    (MIS, f"readonly A=1\nread A <<< 2\npython3 train.py $A {FULL}", (), 0, "read A <<< 2: bash refuses it, since"),
    (MIS, f"readonly A=1\nfor A in 2; do :; done\npython3 train.py $A {FULL}", (), 0, "bash refuses it, since A is"),
    *((MIS, f"{line}\npython3 train.py {FULL}", (), 0, f"not read: line 1: {line}: {why}") for line, why in (
        ("trap 'A=2' ERR", "it runs between commands"), ("trap 'echo no' DEBUG", "it runs between commands"),
        ("time A=2", "a variable that is set behind time is not read"),
        ("local A=2", "bash refuses it outside of a function"),
    )),
    (MIS, f"readonly A\n: ${{A:=b}}\npython3 train.py {FULL}", (), 0, "bash refuses it, since A is readonly"),
    (MIS, f"export A=1\nf() {{ python3 train.py --x; }}\npython3 train.py {FULL}", (), 0, "is read here calls it"),
    (MIS, f"import os\nlambda a=1: os.system('python3 train.py')\nos.system('python3 train.py {FULL}')", (), 0,
     "lambda: may start train.py too, and nothing that is read here calls it"),
    (MIS, f"import subprocess\nsubprocess.run(['bash', '-e', 'run.sh', '-c', 'python3 train.py --a'])\n"
     f"subprocess.run(['python3', 'train.py', *'{FULL}'.split()])", (), 0, NONE),
    *((None, IN_OUT.replace("set -e\n", f"ON=true\nOUT=$HOME/out\n{lines}\n"), (), code, said)
      for lines, code, said in (
        ("cat > $OUT/mis.yaml <<EOF\nuse_tis: $ON\ntis_level: token\ntis_mode: truncate\ntis_upper_bound: 6\nEOF", 0,
         "at 6"),
        ("cat <<'EOF' > $OUT/mis.yaml\nmis:\n  weight: {level: token, bound: truncate, upper: $X}\nEOF", 2, "upper"),
        ("printf 'mis:\\n  weight: {level: token, bound: truncate, upper: %s}\\n' 3 >$OUT/mis.yaml", 1, "capped at 3"),
        ("echo 'mis: {weight: {level: token, bound: truncate, upper: 4}}' > $OUT/mis.yaml", 1, "capped at 4"),
        ("tee $OUT/mis.yaml <<EOF\nmis: {weight: {level: token, bound: truncate, upper: 5}}\nEOF", 1, "capped at 5"),
    )),
    (MIS, f"python3 train.py {FULL} --use-rollout-logprobs", (), 2, TWICE),
    (MIS, "python3 train.py --use-rollout-logprobs", ("--host", "slime"), 2, TWICE),
    (f"{MIS}use_rollout_logprobs: true\n", f"python3 train.py {FULL}", ("--host", "miles"), 2, TWICE),
    (MIS, f"python3 train.py {FULL} --loss-type sft_loss", (), 2, "called: never, as far as the host goes"),
    (MIS, SFT, (), 2, NO_LOSS),
    (MIS, f"{SFT}python3 train.py --lr 1", (), 1, "+python3 train.py --lr 1 \\\n"),
    (MIS, f"{SFT}python3 train.py {FULL}", (), 0, NONE),
    (f"{MIS}loss_type: sft_loss\n", f"python3 train.py {FULL}", (), 2, "sft_loss (in the config file) runs in place"),
    (f"{MIS}custom_tis_function_path: a.b\n", f"python3 train.py {FULL}", (), 2, "path of mis.yaml is set last"),
    (f"{MIS}custom_tis_function_path: {HOOK}\n", f"python3 train.py {STEP} --custom-config-path mis.yaml", (), 0, NONE),
    (MIS.replace("true", "false"), f"python3 train.py {FULL}", (), 2, "use_tis of mis.yaml is set last"),
    (KEPT, f"python3 train.py {FULL} --calculate-per-token-loss", (), 2, "--calculate-per-token-loss divides"),
    (MIS, f"python3 train.py {FULL} --skip-actor-forward-only", (), 2, "Miles refuses to start with it"),
    (MIS, "python3 train.py --skip-actor-forward-only", (), 2, "Miles refuses to start with it"),
    (MIS, f"python3 train.py {FULL} --rollout-top-k 50", (), 2, "rollout_top_k: the engine samples from"),
    (MIS, f"python3 train.py {FULL} --rollout-top-p 0.9", (), 0, "warning: with --host miles: refused: rollout_top_p"),
    (MIS, f"python3 train.py {FULL} --colocate ${{MORE}}", (), 0, "not read: (line 1): ${MORE} may give more flags"),
    (MIS, f"python3 train.py {FULL} --lr=1 ${{MORE}}", (), 0, "not read: (line 1): ${MORE} may give more flags"),
    (MIS, f"cat more | xargs python3 train.py {FULL}", (), 0, "what xargs reads may give more flags"),
    (MIS, f"cat more | parallel -j1 python3 train.py {FULL}", (), 0, "what parallel reads may give more flags"),
    (MIS, f"import miles.utils as U\nU.execute_train(f'{{more()}}--lr 1 {FULL}')", (), 0, "more()--lr may give more"),
    (MIS, ARMS, (), 1, "no diff: "),
    *((MIS, f"A='{FULL}'\n{loop}; done", (), 2, "--use-tis (line 1): there only if this holds: not: while")
      for loop in ("while next; do python3 train.py $A; A=", "while ! python3 train.py $A; do A=")),  # in later rounds
    (MIS, f"import os\na = '{FULL}'\nwhile NOW():\n  os.system('python3 train.py ' + a)\n  a = ''", (), 1, "no diff: "),
    *((MIS, f"f() {{ python3 train.py --lr 1; }}\n{line}\npython3 train.py {FULL}", (), 0, "may start train.py too")
      for line in ("trap f EXIT", "export -f f; parallel f ::: 1 2", "g_$X", "f_$X || true")),
    *((MIS, script.format(f"python3 train.py {FULL}"), (), 0, "vime (line 1)\n", NONE) for script in (
        "start() {{ ray start; {}; }}\nray start --head; start",  # a word of another program, and no function
        "f() {{ {}; }}; g() {{ f() {{ :; }}; echo > mis.yaml; exit; }}\ntrap g EXIT\nf",  # which is tried alone
        "until {}; do sleep 1; done")),
    (MIS, f"i=0\nwhile next; do python3 train.py {FULL} --lr $i; i=$((i+1)); done", (), 0, "holds: while next\n", NONE),
    (MIS, f"python3 train.py -- {FULL}", (), 1, "the host takes nothing behind -- for a flag"),
    (MIS, f"python3 train.py --train-backend fsdp {FULL}", ("--host", "miles"), 1, "the script trains with fsdp"),
    (MIS, f"python3 train.py {FULL}", ("--host", "torchtitan"), 0, "the script trains with megatron, by default"),
    (MIS, "python3 train.py --use-ti", (), 1, "(did you mean --use-tis?)"),
    (MIS, "python3 train.py --train-backend fsdp --use-ti", (), 2, "Miles may take it for --use-tis; write it out"),
    (MIS, f"python3 train.py --train-b fsdp {FULL}", (), 2, "(line 1): Miles may take it for --train-backend"),
    ("use_tis: true\nmis:\n", f"python3 train.py {FULL}", (), 2, "(the file says use_tis, mis)"),
    (MIS, f"python3 train.py {FULL}", ("--preset", "icepop"), 1, "icepop): --preset icepop"),
    (MIS, f"docker run a bash -lc 'python3 train.py {FULL}'", (), 0, "or in a text that it runs): a hook of this pack"),
    (MIS, "python3 train.py --max-seq-len 1", ("--host", "miles"), 1, "a function that the command loads may add it"),
    (MIS, TYPER, (), 0, NONE),
    (MIS, TYPER, ("--", "--no-mis"), 1, NEVER),
    (MIS, TYPER, ("--", "--extra", "--use-rollout-logprobs"), 2, TWICE),
    (MIS, TYPER, ("--", "--no-miss"), 2, "--no-miss: no option of main (mis, extra, upper)"),
    (MIS, TYPER, ("--", "MILES_SCRIPT_MIS=0"), 2, "MILES_SCRIPT_MIS=0: no option of main"),
    (MIS, TYPER, ("--", "--upper=2.5"), 2, "--upper=2.5: got '2.5'; expected a whole number"),
    (MIS, TYPER, ("--", "--upper"), 2, "--upper: the option lacks its value"),
    (MIS, TYPER, ("--", "--mis=0"), 2, "--mis=0: the option takes no value"),
    (MIS, PYTHON.replace("U.Execute", "my.Execute").replace("my.ExecuteTrainConfig", "Base"), ("--", "--more", "1"), 1,
     "not read: --more: Base may have the option"),
    (MIS, PYTHON, ("--", "--enable-miss"), 2, "--enable-miss: no option of main (num_nodes"),
    (MIS, START, ("--", "--lr"), 0, "not read: --lr: no command is seen that takes it"),
    (MIS, WRITTEN.format(f"open(p, 'w').write('a: 1')\nopen(p, 'w').write({MIS!r})"), (), 0, NONE),
    (MIS, WRITTEN.format(f"with open(p, 'w') as f:\n  f.write({MIS[:14]!r})\n  f.write({MIS[14:]!r})"), (), 0, NONE),
    (MIS, WRITTEN.format(f"open(p, 'a').write({MIS!r})"), (), 2, SURE),
    (MIS, WRITTEN.format(f"if now():\n  open(p, 'w').write({MIS!r})"), (), 2, SURE),
    (MIS, WRITTEN.format("with open(p, 'w') as f:\n  yaml.dump(cfg, f)"), (), 2, SURE),
    (MIS, WRITTEN.format("open(p, mode='w').writelines(lines)"), (), 2, SURE),
    (MIS, WRITTEN.format("with open(p, 'w') as f:\n  print('use_tis: false', file=f)"), (), 2, SURE),
    (MIS, WRITTEN.format("make.config('a.yaml', p)"), (), 2, "something that the script calls may write it"),
    (MIS, WRITTEN.format("open(p).read()"), (), 1, "no such file"),
    (MIS, f"{START}from miles.utils import execute_train as go\ngo(train_args='--lr 1')", (), 1, "(line 5)"),
    (MIS, f"{START}go = U.execute_train\ngo(train_args='--lr 1')", (), 1, "train.py of Miles (line 5)"),
    (MIS, f"{START}A = ['--lr', '1']\nsubprocess.run(['python3', 'train.py', *A])", (), 1, "of Miles (line 5)"),
    (MIS, f"{START}subprocess.run(['python3', 'train.py', *more()])", (), 0, "may start train.py too"),
    (MIS, f"import subprocess\nC = f\"x='{{more()}}' python3 train.py {FULL}\"\nsubprocess.run(['bash', '-c', C])",
     (), 0, "starts: train.py of Miles"),
    (MIS, f"import subprocess\nsubprocess.run(['bash', '-c', 'python3 train.py \"$@\"', 'x', *{FULL.split()}])",
     (), 0, NONE),
    (MIS, f"{START}subprocess.run(['ssh', 'host', 'python3 train.py --lr 1'])", (), 0, "may start train.py too"),
    (MIS, f"import sys\n{START}runpy.run_path('train.py')", (), 1, "sys.argv may give more flags"),
    (MIS, f"print('python3 train.py')\n{START}", (), 0, "nothing has to change"),
    *((MIS, f"{START}{line}", (), 0, "may start train.py too") for line in (
        "T = 'python3 train.py {}'\nos.system(T.format(1))", "C = 'python3 train.py'\nC += ' %s' % A\nos.system(C)",
        "C = ['python3', 'train.py', 1]\nsubprocess.run(C[:2] + D)", "add_argument('--file', default='train.py')",
        "def f(*a): subprocess.run(['python3', 'train.py', *a])\nf(*more())",
        "class A:\n  def f(self): os.system('python3 train.py')\nThread(target=A().f).start()",
    )),
    (MIS, f"{START}def f(): os.system('python3 train.py')\n{{1: f}}[N]()", (), 1, "holds: something calls f"),
    (MIS, f"{START}def f(a='--b'): os.system(f'python3 train.py {{a}}')\nThread(target=f, args=A)", (), 1,
     "only if this holds: Thread(target=f, args=A)"),
    (MIS, f"import os\nos.path.exists('train.py')\nopen('train.py')\n{START}", (), 0, NONE),
    (MIS, f"{START}subprocess.run(['python3', 'train.py'] + more())", (), 0, "may start train.py too"),
    (MIS, f"{START}A = ['python3', 'train.py']\nA.extend(more())\nsubprocess.run(A)", (), 0, "may be started too"),
    *((MIS, f"{line}\npython3 train.py {FULL}", (), 0, NONE) for line in (
        "cp /root/miles/train.py /workspace/train.py", "sed -i s/a/b/ train.py", "test -f train.py", "vim train.py",
        "tail -f logs/train.py", "chmod +x train.py", "git checkout -- train.py", "D=$(dirname $(realpath train.py))",
    )),
    (MIS, f"bash -c \"$(cat x)\"\npython3 train.py {FULL}", (), 0, 'bash -c "$(cat x)": its text is not known'),
    (MIS, f"$(cat x)\npython3 train.py {FULL}", (), 0, "$(cat x): may start train.py too"),
    (MIS, f"f() {{ python3 train.py --lr 1; }}\nbash -c f\npython3 train.py {FULL}", (), 0, NONE),
    (MIS, f"declare -n R=A\nA=({FULL})\nR+=(--lr 1)\npython3 train.py ${{A[@]}}", (), 0, "line 3: R+=(--lr 1): which"),
    *((MIS, f"f() {{ python3 train.py $*; }}\n{line}\nbash -c 'f {FULL}'", (), 0, NONE) for line in (
        "export -f f", "declare -fx f", "set -a; f() { python3 train.py $*; }",
    )),
    (MIS, "cat > job.sh <<E\npython3 train.py\nE\nsrun job.sh", (), 2, "not read: srun job.sh: runs another script"),
    (MIS, f"python3 train.py {FULL} --lr 1\\\n--get-mismatch-metrics\\\n --use-rollout-logprobs", (), 2, TWICE),
    (MIS, f"python3 train.py {FULL} --lr 1\\\n--use-rollout-logprobs", (), 0, NONE),
    *((MIS, f"A='{text}'\npython3 train.py --lr 1 $A\\\n{FULL}", (), 2, "$A--use-tis") for text in ("", "--b 2 ")),
    (MIS, f"A=(--lr 1\\\n--use-rollout-logprobs)\npython3 train.py {FULL} ${{A[@]}}", (), 0, NONE),
    *((MIS, f"python3 train.py {FULL} {said}", (), 0, "not read: (line 1): ") for said in (
        r"$(echo -e '--a\t--b')", r"$(echo -ne '--a\t--b')", r'`echo "--a \`echo --b\`"`',
    )),
    (MIS, f"shopt -s nocasematch\npython3 train.py {FULL}", (), 0, "which words and patterns fit from here on is not"),
    (MIS, f"python3 train.py {FULL} --load ~user/x --custom-config-path ~jo.do/a.yaml", (), 2, "~jo.do/a.yaml"),
    *((MIS, f"A=1\n{line}\necho 2 | read -r A\npython3 train.py {FULL} $A", (), 0, said) for line, said in (
        ("shopt -s lastpipe", "read -r A may give more flags"), ("shopt -s lastpipe\nshopt -u lastpipe", NONE),
    )),
    (MIS, f"black train.py\npython3 train.py {FULL}", (), 0, "black train.py: may start train.py too"),
    *((MIS, f"{program} train.py --lr 1", (), 1, f"+{program} train.py --lr 1 \\") for program in (
        "wrapper -n 1 python3.11", "torchrun --nproc 8", "uv run", "$PYTHON", "srun $PYTHON", "nohup",
    )),
    ("a: 1", f"echo '{MIS[14:-1]}' >mis.yaml\necho use_tis: true >>mis.yaml\npython3 train.py {FULL}", (), 0, NONE),
    *((None, f"cat <<E {to}\n{MIS}E\npython3 train.py {FULL}", (), 0, NONE) for to in (
        "| tee mis.yaml", "| tee mis.yaml > /dev/null", "> mis.yaml && ls",
    )),
    (None, f"cat > mis.yaml <<E && python3 train.py {FULL} --lr 1\n{MIS}E", (), 0, NONE),
    *(("a: 1", f"{before} cat > {name} <<E\n{MIS}E\n{behind}python3 train.py {FULL}", (), 0, NONE)
      for before, name, behind in (
        ("", "./mis.yaml", ""), ("", "$PWD/mis.yaml", ""), ("cd x;", "../mis.yaml", "cd ..\n"),
    )),
    (MIS, f"cd x; echo a: 1 > mis.yaml; cd ..\npython3 train.py {FULL}", (), 0, NONE),
    *((None, f"{lines}\npython3 train.py {FULL}", (), 2, SURE) for lines in (
        "python - <<E | tee mis.yaml\nprint(1)\nE", "{ echo a; echo b; } > mis.yaml",
        "envsubst < t.yaml > mis.yaml", "python - > mis.yaml", "cp x.yaml mis.yaml",
        "cp conf/mis.yaml .", "echo a | tee mis.yaml", f"cat <<E | sed s/a/b/ > mis.yaml\n{MIS}E",
        "curl -o mis.yaml http://a", f"cat a.yaml - <<E > mis.yaml\n{MIS}E",
    )),
    *((MIS, f"{line}\npython3 train.py {FULL}", (), 2, SURE) for line in (
        "echo 'a: 1' >> mis.yaml", "sed -i s/2/3/ mis.yaml", "date | tee -a mis.yaml", "date | sudo tee mis.yaml",
    )),
    (None, f"python gen.py --out=mis.yaml\npython3 train.py {FULL}", (), 2, "something that the script calls may"),
    (None, f"test -f mis.yaml\npython3 train.py {FULL}", (), 1, "no such file"),
    *((MIS, f"ARGS=({FULL})\n[ $W ] && ARGS+=(--use-wandb)\n{start}", (), 0, NONE) for start in (
        'run() { local cmd="$*"; eval "$cmd"; }\nrun python3 train.py "${ARGS[@]}"',
        'eval "python3 train.py ${ARGS[*]}"',
    )),
    (MIS, f"X[1]=--lr\npython3 train.py {FULL} ${{X[@]}}", (), 0, "not read: (line 1): X[1]=--lr may give more flags"),
    (MIS, f"C=mis.yaml\ncat <<E\n${{C:=b}}\nE\npython3 train.py {FULL.replace('mis.yaml', '$C')}", (), 0, NONE),
    (MIS, f"cd /none/miles\npython3 train.py {FULL}", (), 2, "the script changes to /none/miles/, where it is not"),
    (MIS, f"cd /none/miles\ngit pull\ncd -\npython3 train.py {FULL}", (), 0, NONE),
    (MIS, f"pushd /none\npopd\npython3 train.py {FULL}", (), 0, NONE),
    (MIS, f"pushd /none; pushd sub; popd; popd\npython3 train.py {FULL}", (), 0, NONE),
    (MIS, f"pushd /none; cd sub; popd\npython3 train.py {FULL}", (), 0, NONE),
    (MIS, f"popd\npython3 train.py {FULL}", (), 2, "the script changes to popd, where it is not"),
    (MIS, f'ray job submit --working-dir "$PWD" -- python3 train.py {FULL}', (), 0, NONE),
    (MIS, f"#SBATCH --chdir=/none\npython3 train.py {FULL}", (), 2, "the script changes to /none/, where it is not"),
    *((MIS, f"{before} python3 train.py {FULL}", (), 2, "the script changes to /none/, where it is not")
      for before in ("pushd /none;", "ray job submit --working-dir=/none --", "srun --chdir /none",
                     """ray job submit --runtime-env-json '{"working_dir": "/none"}' --""")),
    *((MIS, f"{line.replace('START', START)}", (), 2, "the script changes to /none/, where it is not")
      for line in ("import os\nos.chdir('/none')\nSTART",
                   f"import subprocess\nsubprocess.run('python3 train.py {FULL}', shell=True, cwd='/none')")),
    *((MIS, f"{gone}\npython3 train.py {FULL}", (), 2, SURE) for gone in ("mv mis.yaml x.yaml", "rm mis.yaml x.yaml")),
    (MIS, f"python3 train.py {FULL} --rollout-sample-filter-path mis_plugins.mis.drop_brokn_samples", (), 2,
     "line 1): mis-plugins has no function mis_plugins.mis.drop_brokn_samples"),
    *((MIS, f"python3 train.py {FULL} --custom-megatron-init-path {hook}", (), 0, NONE)
      for hook in ("mis_plugins.mis.carry_versions", "true_on_policy.hosts.$HOOK")),
    (MIS, f"python3 train.py {FULL} --custom-generate-function-path "
     "mis_plugins.hosts.versions.generate.generate_with_versions", (), 0, NONE),
    *((MIS, f"python3 train.py {FULL}".replace("--use-tis", f"--use-tis{value}"), (), 2, "takes no value, and the host")
      for value in ("=false", " false")),
    (MIS, "A='--lr 1' B='--use-tis'\nALL=\"${A} ${B}\"\npython3 train.py $ALL", (), 1, "by --use-tis (line 1)"),
    (MIS, "python3 train.py $A$B", (), 1, "not read: (line 1): $A$B may give more flags"),
    (MIS, f'cd "$(dirname "$0")"\npython3 train.py {FULL}', (), 0, NONE),
    (MIS, f"J=$(ray job submit -- python3 train.py --lr 1)\npython3 train.py {FULL}", (), 1, "+J=$(ray job submit -- "),
    *((MIS, f"{line}\npython3 train.py {FULL}", (), 0, "may start train.py too") for line in (
        'ssh h "python3 train.py --lr 1"', "sbatch --wrap 'python3 train.py'", "tmux send-keys 'python train.py' C-m",
        "ssh h <<E\npython3 train.py\nE", "bash <<< 'python3 train.py'",
    )),
    *((MIS, f"{line}\npython3 train.py {FULL}", (), 0, "runs another script, which is not read") for line in (
        "bash inner.sh", "./inner.sh", "sbatch inner.slurm", "echo 'python3 train.py' | bash",
    )),
    (MIS, BRANCHED.format("--loss-type custom_loss"), (), 2, "--loss-type (line 3): there only if this holds: ["),
    (MIS, BRANCHED.format("--prompt 'a b' --x"), (), 1, "): --colocate --prompt 'a b' --x may give more flags"),
    *((MIS, f"CMD={words}\n{start}", (), 1, f"+{start.split(' >')[0]} \\") for words, start in (
        ("'python3 train.py --colocate'", "$CMD"), ("'python3 train.py --colocate'", "$CMD > log 2>&1 &"),
        ("(python3 train.py --colocate)", '"${CMD[@]}"'), ("(python3 train.py --colocate)", '"${CMD[@]}" > log &'),
    )),
    *((MIS, f'import os, pathlib, shutil, subprocess\n{line}\n'
       'os.system("python train.py --custom-config-path mis.yaml")', (), 2,
       "config: mis.yaml: the script writes it, with parts that are not known") for line in (
        'shutil.copy("a.yaml", "mis.yaml")', 'os.system("sed -i s/2/5/ mis.yaml")',
        'subprocess.run(["cp", "a.yaml", "mis.yaml"])', 'shutil.move("a.yaml", dst="mis.yaml")',
        'pathlib.Path("a.yaml").rename("mis.yaml")', 'os.system("cd . && /bin/cp a.yaml mis.yaml")',
    )),
    (MIS, 'run() { "$@"; }\nrun python3 train.py --lr 1\nrun ls', (), 1, "no diff: the flags come together"),
]  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_what_is_told_of_a_script(case: tuple, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, script, given, code, *sentences = case
    if config is not None:
        Path("mis.yaml").write_text(config)
    status, output = check(capsys, tmp_path, "run.py" if "import" in script else "run.sh", script, *given)
    assert status == code and all(text in output for text in sentences), output
    assert "\x1b" not in output and (code == 1) == ("\n+++ " in output or "no diff: " in output)


def test_a_warning_is_told_once(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mis.yaml").write_text("mis: {segment_wise: {}}\n")
    needed = " --loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss"
    script = f"python3 train.py{needed} {STEP} --custom-config-path mis.yaml"
    output = check(capsys, tmp_path, "run.sh", script, "--host", "miles")[1]
    assert output.count("warning: mis.segment_wise on Miles") == 1
    rounds = f"i=0\nwhile next; do\n{script} --lr $i\ni=$((i + 1))\ndone"
    assert check(capsys, tmp_path, "run.sh", rounds, "--host", "miles")[1].count("starts: ") == 1


@pytest.mark.parametrize("name", ["run.sh", "a b.slurm", "in/run.sh", "../here/run.sh", "/run.sh", "link.sh"])
def test_a_patch_finds_its_script(name: str, tmp_path: Path, capsys, monkeypatch) -> None:
    here = tmp_path / "here"
    (here / "in").mkdir(parents=True)
    monkeypatch.chdir(here)
    given = f"{here}{name}" if name[0] == "/" else name
    Path("in/of link.sh" if name == "link.sh" else given).write_text("# a\u2028b\n\n\n\npython3 train.py --lr 1\n")
    if name == "link.sh":
        Path(name).symlink_to("in/of link.sh")
    assert main(["config", "check", given]) == 1
    told = capsys.readouterr().out
    how = next(
        (line.partition(": ")[2] for line in told.splitlines() if line.startswith("apply it with: ")), "patch -p0"
    )
    subprocess.run(shlex.split(how), input=told, text=True, check=True)
    assert main(["config", "check", given]) == 0


def test_a_branch_that_is_known_is_taken(tmp_path: Path, capsys) -> None:
    script = shell("", OURS).replace(
        "ray job", 'MODE=watch\nif [[ $MODE == watch ]]; then GRPO_ARGS+=(--get-mismatch-metrics); '
        "else GRPO_ARGS+=(--use-tis); fi\ncase $MODE in w*) GRPO_ARGS+=(--seed 1);; *) exit 2;; esac\nray job"
    )  # fmt: skip
    assert check(capsys, tmp_path, "run.sh", script)[0] == 0
    assert "--use-tis" not in texts(script) and "--seed" in texts(script)


LOOP, START = 'S=0\nset -- "$@" --rest\nwhile [ {} ]; do case $1 in {} esac; done\n', 'python train.py --s $S "$@"'


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("A=(--a 'b c' --d)\npython train.py \"${A[@]}\" \"$@\"", ["--a", "b c", "--d", "--seed", "7"]),
        ("A='--a 1'\npython3 -u /root/slime/train_async.py $A --b=\"x y\"", ["--a", "1", "--b=x y"]),
        ("run() { python train.py --n \"$1\" \"${@}\"; }\nrun 3 --x", ["--n", "3", "3", "--x"]),
        ("eval \"python train.py --a b\"", ["--a", "b"]),
        ('A="--a 1" B=2\nC="$A  $B $((1 + 1)) x"\npython train.py $C', ["--a", "1", "2", HOLE, "x"]),
        ("python train.py `echo a` `echo $A` $'b'\\c", [HOLE, "bc"]),
        ("false && A=1 || A=2\ncd /x && B=1\npython train.py --a $A", ["--a", "2"]),
        ("for i in 1 2; do A+=(--x$i); done\npython train.py ${A[@]}", ["--x1", "--x2"]),
        ("cmd=\"python train.py --a\"\n$cmd b", ["--a", "b"]),
        ("D=$(cd \"$(dirname \"${BASH_SOURCE[0]}\")\" && pwd)\npython train.py --d $D/x", ["--d", "./x"]),
        ("python train.py --a $'x\\ty' \\\n  --b \"q\\\"r\" # --c", ["--a", "x\ty", "--b", 'q"r']),
        ("python train.py --key ${KEY} --n ${N:-4}", ["--key", HOLE, "--n", "4"]),
        ("pkill -f train.py\npython train.py --a", ["--a"]),
        ("f() { if [ $X ]; then A=1; return; else A=2; exit 1; fi; }\nf\npython train.py --a $A", ["--a", "1"]),
        ("f() { if [ $X ]; then A=1; exit 1; else A=2; return; fi; }\nf\npython train.py --a $A", ["--a", "2"]),
        ("A=(--a 1)\npython train.py ${A[@]+${A[@]}} ${A%1} ${B+--b}", ["--a", "1", HOLE, HOLE]),
        ("read -ra A <<< \"--a 1\"\npython train.py ${A[@]}", ["--a", "1"]),
        *((f"A=(--a 'b c')\npython train.py {items}", ["--a", "b c"]) for items in (
            '${A[@]+"${A[@]}"}', '"${A[@]+${A[@]}}"', '${A[@]:+"${A[@]}"}', '"${A[@]:-}"', '"${A[@]+"${A[@]}"}"',
        )),
        ('f() { python train.py ${1+"$@"}; }\nf --a "b c"', ["--a", "b c"]),
        ('A=1\nB=\npython train.py ${A:+--a "$A"} ${B:+--b "$B"} ${A:+--c "d $A"}', ["--a", "1", HOLE]),
        ("for A in '' 'b c'; do B=(${A:+--a \"$A\"}); done\npython train.py ${B[@]}", [HOLE]),
        # a word goes on behind a second expansion
        *((f"A=p B=q C=x\n{line}\npython train.py $C", ["p/b_q.c"]) for line in (
            "C=$A/b_$B.c", "C=${A}/b_$B.c", "C=\"$A\"/b_$B.c", "C='p'/b_$B.c", "export C=$A/b_$B.c",
            "f() { local A=$A/b_$B.c; C=$A; }\nf", "for C in $A/b_$B.c; do :; done",
        )),
        ("A=p B=q\npython train.py $A/$B.c $A-$B-$A,$B/ $A/$B模 $((A-$B-1))",
         ["p/q.c", "p-q-p,q/", "p/q模", HOLE]),
        *((f"s() {{ {line}; }}\ns A --a\npython train.py $A", ["--a"]) for line in (
            'export "$1"="$2"', 'declare -g "$1=$2"', 'declare -g ${1}="$2"',
        )),
        # words behind a redirect or a heredoc belong to the command
        *((f"python train.py --a {line}", ["--a", "--b", "c"]) for line in (
            "2>&1 >log --b c", "> log --b 2>&1 c | tee x", ">log 2>&1 \\\n --b c &", "<<E --b c\nx\nE",
        )),
        # a part of an evaluated text that is not known stays so in single quotes
        *((f"{shell} \"python train.py --a '$NOPE' --b '$NOPE/c'\"", ["--a", HOLE, "--b", f"{HOLE}/c"])
          for shell in ("bash -c", "A='x'; sh -c", "srun bash -lc")),
        ("bash <<E\npython train.py --a '$NOPE' $'$NOPE'\nE", ["--a", HOLE, HOLE]),
        ("seq 2 | xargs -I% python train.py --a % --b x%.y", ["--a", HOLE, "--b", f"x{HOLE}.y", HOLE]),
        *((f"xargs {mark} python train.py % b", [HOLE, "b", HOLE]) for mark in ("-I %", "--replace=%")),
        ("xargs -I% bash -c 'A=%; python train.py --a %'", ["--a", HOLE]),
        ("xargs -n1 sh -c 'python train.py --a \"$0\" \"$@\"'", ["--a", HOLE, HOLE]),
        ("find . -exec python train.py --a {} --b \\;", ["--a", HOLE, "--b"]),
        ("f() { python train.py --a $1; }\nexport -f f\nxargs -I{} bash -c 'f {}'", ["--a", HOLE]),
        # bash puts the names of files in place of a word with a star, and none for KEY=* or in quotes
        ("A='a?'\npython train.py *.y *.{y,z} $A/$B $A \"$A\" --b=*.y x\\*", [*[HOLE] * 4, "a?", "--b=*.y", "x*"]),
        ("A=(*.y)\nfor b in *; do :; done\npython train.py \"${A[@]}\" $b", [HOLE, HOLE]),
        *((f"f() {{ {kind} A={first}; A{second}; python train.py $A; }}\nf", [expected])
          for kind, first, second, expected in (
            ("declare -i", "1+1", "=2*N", HOLE), ("local -i", "3", "=5", "5"), ("local -i", "3", "+=4", HOLE),
            ("declare -u", "a", "=b", HOLE), ("declare -ia", "(1+1)", "+=(2)", HOLE), ("local", "1+1", "+=4", "1+14"),
        )),
        ("declare -l A\nunset A\nA=B\npython train.py $A", ["B"]),
        *((f"{line}\npython train.py \"$A\"", [HOLE]) for line in (
            "mapfile A <<< p", "mapfile -d , -t A <<< p,q", "read -d, A <<< p,q", "OPTARG=p; getopts a: A; A=$OPTARG",
            "REPLY=p; read <<< q; A=$REPLY", "A=(p); : ${A[1]:=q}; A=${A[*]}", "f() { local A+=q; B=$A; }; A=; f; A=$B",
            "declare -A M; M[k]=v; declare -a M=(p q); A=${M[1]}", "echo A=$X > /none/a.sh; source /none/a.sh",
        )),
        ("A=1 > log\nB=2 2> log\n> log C=3 D=4 python train.py $A$B$C", ["12" + HOLE]),
        ("A=a\nlocal A=b\npython train.py $A", ["a"]),
        ("X=('' b)\n: ${X:=c}\npython train.py \"${X[@]}\"", ["c", "b"]),
        ("X=(a b)\nf() { local X=q; python train.py ${X[@]}; }\nf", ["q"]),
        ("echo A=p > /nowhere/env.sh\nsource /nowhere/env.sh\npython train.py $A", ["p"]),
        ("bash --rcfile /nowhere/rc -c 'python train.py --a'", ["--a"]),
        ("\ufeffimport os; os.system('python train.py --a')", ["--a"]),
        ("f() { A=$(cat <<E\n--a $1$x \\$1 $#\nE\n); }\nf 3\npython train.py $A", ["--a", f"3{HOLE}", "$1", HOLE]),
        ("set -euo pipefail\npython train.py \"$@\"\n", ["--seed", "7"]),
        ("set -ex -- a b\nset c d\npython train.py \"$@\" $10", ["c", "d", HOLE]),
        *((f"B='a*'\nif [ abc = {text} ]; then A=--a; else A=--b; fi\npython train.py $A", [expected])
          for text, expected in (("a*", HOLE), ("$B", HOLE), ("'abc'", "--a"), ("$C", HOLE), ('"$B"', "--b"))),
        *((f"return 0 2> log{more}\npython train.py --a", ["--a"]) for more in ("", "; return", " && exit")),
        ("f() { return 0 && exit; }\nf\npython train.py --a\nreturn 2> /dev/null || exit\npython train.py", ["--a"]),
        ("exec 2> log\nif [ $X ]; then exec python train.py --a; fi\nexec ls\npython train.py --b", ["--a"]),
        ("import os\nos.execvp('python', ['python', 'train.py', '--a'])\nos.system('python train.py')", ["--a"]),
        ("import os\ngo = lambda x: os.system('python train.py ' + x)\ngo('--a')", ["--a"]),
        *(("import os\ndef make(a):\n" + f"  {line}\n  return f\nx = make('--a')\ny = make('--b')\nx()", ["--a"])
          for line in ("f = lambda: os.system('python train.py ' + a)", "def f(): os.system('python train.py ' + a)")),
        ("import shlex\nshlex.split('python train.py\\n --a 1\\n --b')", ["--a", "1", "--b"]),
        ("import os\nos.system(\"bash -c 'python train.py $0'\")", [HOLE]),
        ('import subprocess\nsubprocess.run(["python", "train.py", "it\'s", "a\'", "--b"])', ["it's", "a'", "--b"]),
        ('import subprocess\nsubprocess.run("python train.py --a\\t1".split())', ["--a", "1"]),
        ('import os, subprocess\np = os.path.join(HERE, "train.py")\nsubprocess.run(["python", p, "--a"])', ["--a"]),
        ("import m\nasync def f():\n  async with g():\n    await h('python train.py --a')\nm.run(f())", ["--a"]),
        # what the parser of bash cuts in two, or leaves in a word, is not taken for known
        *((f"A=1\n{line}\npython train.py ${{A}}", [HOLE]) for line in (
            "A=$x'q'\\\n.c", "A+=\"q\"\\$B", "A=${B}\\n$#", "A=`nproc`$((1 + 1))\\$B", "A=${B:-`nproc`}",
            'A="$((\n1+$B-1))"', 'A="$(((1+(2+1))+$B-1))"', "A=${A: -$B}", "A=$(cat <<E\n`nproc`\nE\n)",
            "export A={b,$B,c}", "f() { local A={b,c}; B=$A; }\nf\nA=$B",
        )),
        ("f() { python train.py --a $1; }\nA=1\nf ${A}`echo v`$((1+2))\\$A", ["--a", f"{HOLE}$A"]),
        ("for A in 'b'$'c'\\$d; do python train.py $A; done", ["bc$d"]),
        ("readarray -t A <<E\n--a\nb c\nE\npython train.py \"${A[@]}\"", ["--a", "b c"]),
        ("read -r -d '' A <<'E'\n--a\n1\nE\npython train.py $A", ["--a", "1"]),
        ("read -r -d '' A <<E\n--a\nE\nbash <<E\npython train.py $A b\nE", ["--a", "b"]),
        ("read -r A B <<E\n--a 1\nE\npython train.py $A", [HOLE]),
        ('A=${A:-["x"]}\npython train.py --a $A ${B:-["y", "z"]}', ["--a", "[x]", "[y,", "z]"]),
        *((f"{LOOP.format(cond, body)}{START}", words) for cond, body, words in (
            ("$# -gt 0", '--seed) S=$2; shift 2 ;; *) break ;;', ["--s", "7", "--rest"]),
            ('-n "${1:-}"', '--seed) S=$2; shift; shift ;; *) shift; continue ;;', ["--s", "7"]),
            ("$# -gt 0", '--seed) S=$2; [ $X ] && break; shift 2 ;; *) break ;;', ["--s", HOLE, HOLE]),
            ("$# -gt 0", '--seed) S=$2; [ $X ] || shift 2 ;; *) break ;;', ["--s", HOLE, HOLE]),
            ("-f x", '--seed) S=$2; shift 2 ;; *) break ;;', ["--s", HOLE, HOLE]),
        )),
        ("f() { while (( $# )); do A+=(${1#*=}); shift; done; }\nf --x=--a --y=b=c\npython train.py ${A[@]} ${A##*=}",
         ["--a", "b=c", "--a"]),
        ("while [ $# -ne 0 ]; do shift; done\npython train.py --a \"$@\"", ["--a"]),
        *((f"if {condition}; then A=--a; else A=--b; fi\npython train.py $A", [expected])
            for condition, expected in (
                ("[ a = b ] || [ c = c ]", "--a"), ("[[ a = a ]] && [ $X ] && [[ c = d ]]", "--b"),
                ("! [ a = a ] || false", "--b"), ("ls && [ a = a ]", HOLE),
            )),
        ("if [ $X ]; then S=train.py; else S=/x/train.py; fi\nif [ $Y ]; then T=train.py; fi\npython $T --a", ["--a"]),
            ('a = "--x "\na += f"--n {2 * 3} "\nU.execute_train(train_args=a)', ["--x", "--n", "6"]),
        ('d = {"H": 8}\nU.execute_train(f"--n {d[chr(72)]} --m {d[\'H\']}")', ["--n", HOLE, "--m", "8"]),
        ('match "b":\n  case "a" | "c":\n    t = "--a"\n  case _:\n    t = "--o"\nU.execute_train(t)', ["--o"]),
        ('U.execute_train(" ".join([f"--{n}" for n in ("a", "b")]))', ["--a", "--b"]),
        ('def f(n, k="--k"):\n    if n > 1:\n        return k\n    raise ValueError\nU.execute_train(f(2))', ["--k"]),
        ('import subprocess\nsubprocess.run(["python", "train.py", "--a", "b c"])', ["--a", "b c"]),
        ('import os\nos.system("ray job submit -- python3 train.py --a " + os.environ.get("N", "4"))', ["--a", "4"]),
        ('from pathlib import Path\np = Path("a") / "b"\nU.execute_train(f"--p {p}")', ["--p", "a/b"]),
        ("def f():\n  if U.x():\n    return '--a'\n  else:\n    raise SystemExit\nU.execute_train(f())", ["--a"]),
        ('t = "--a" if None is None and not "" else "--b"\nU.execute_train(t)', ["--a"]),
        ('t = not (NOW() or True)\nU.execute_train("--a" if t else "--b")', ["--b"]),
        *(  # an operand that may not run sets no sure name
            (f"A, B = '--a', 1\n{statement.format(condition)}\nU.execute_train(A)", [expected])
            for statement in ("if {}: pass", "x = {}") for condition, expected in (
                ("False and (A := '--n')", "--a"), ("True or (A := '--n')", "--a"), ("True and (A := '--n')", "--n"),
                ("NOW() and (A := '--n')", HOLE), ("NOW() or B and (A := '--n')", HOLE),
            )
        ),
    ],
)  # fmt: skip
def test_words_of_a_start(script: str, expected: list[str]) -> None:
    assert texts(script) == expected


def test_a_flag_of_a_branch_that_is_not_known_names_it() -> None:
    script = 'a = "--x "\nif U.cuda():\n    a += "--use-tis "\nU.execute_train(a)'
    found = [(word.text, word.branch) for word in words(script)]
    assert found == [("--x", None), ("--use-tis", "U.cuda()")]


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("run.sh", "A=xx\n" + "A=$A$A\n" * 60 + "python train.py $A"),
        ("run.sh", "A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60),
        ("run.sh", "f() { f; f; }\nf"),
        ("run.sh", "a && " * 20000 + "b"),
        ("run.sh", "echo nothing"),
        ("run.py", "a = 'x' * 3\n" + "a = f'{a}{b}'\n" * 2 + "a = 'xy'\n" + "a = a + a\n" * 60),
        ("run.py", "x = 2\n" + "x = x * x\n" * 99 + "x = [1]\n" + "x = x + x\n" * 60),
        ("run.py", "def f():\n    f()\nf()"),
        ("run.py", "a = " + "(" * 5000 + ")" * 5000),
        ("run.py", "a = " + "-" * 50000 + "1"),
        ("run.py", "a = 1\0"),
        ("run.py", "def"),
        ("run.py", "break"),
        ("run.py", "import os\nos.remove('x')"),
    ],
    ids=lambda text: str(text)[:24],
)
def test_a_hostile_script_is_an_error_in_words(
    name: str, script: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "SECONDS", replace(budget.SECONDS, base=1))
    code, told = check(capsys, tmp_path, name, script)
    assert code == 2 and told.startswith(str(tmp_path / name)) and "Traceback" not in told and len(told) < 1000


def test_a_script_is_never_executed(tmp_path: Path, capsys) -> None:
    made = tmp_path / "made"
    check(capsys, tmp_path, "run.sh", f"A=$(touch {made})\ntouch {made}\n{shell()}")
    check(capsys, tmp_path, "run.py", f"open({str(made)!r}, 'w').write('x')\n{PYTHON}")
    assert not made.exists()


def test_other_targets_take_no_arguments_of_a_script(capsys) -> None:
    assert main(["config", "check", "tis", "--", "--enable-mis"]) == 2
    assert "belong to a launch script" in capsys.readouterr().err


def test_a_missing_parser_of_bash_names_the_extra(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tree_sitter", None)
    code, told = check(capsys, tmp_path, "run.sh", shell())
    assert code == 2 and "mis-plugins[scripts]" in told
