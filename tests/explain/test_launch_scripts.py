"""Launch scripts of other frameworks: no rule is lost, whatever the idiom; bash itself says what a command is given."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.break_it.scripts import given_by_bash
from lab.break_it.translate import as_yaml
from mis_plugins.__main__ import main
from mis_plugins.config.model import CorrectionConfig, ObjectiveConfig, RejectRule, WeightConfig
from mis_plugins.errors import ConfigError
from mis_plugins.explain.launch.bash import grammar
from mis_plugins.explain.translate import areal, ms_swift, trl, verl
from mis_plugins.explain.translate.script import ASKED, Asked

IS, ACTOR = "algorithm.rollout_correction.", "actor_rollout_ref.actor."
MODE, THRESHOLD = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"
TRAIN = "python3 -m verl.trainer.main_ppo"
MEAN = (RejectRule(over="mean", lower=1 / 1.01, upper=1 / 0.99),)
BOTH = CorrectionConfig(WeightConfig(upper=2.0), MEAN)
RULE = f"{IS}rollout_rs=seq_mean_k1 {IS}rollout_rs_threshold=0.99_1.01"
WEIGHT = f"{IS}rollout_is=token {IS}rollout_is_threshold=2.0"

# ------------------------------------------------------------------------------------------ a random correction, read

IDIOMS: dict[str, Callable[[str, list[str], int], tuple[str, str]]] = {
    "in place": lambda name, words, i: ("", " \\\n  ".join(words)),
    "array": lambda name, words, i: (f"{name}=(\n  " + "  # why\n  ".join(words) + "\n)", f'"${{{name}[@]}}"'),
    "array in one line": lambda name, words, i: (f"{name}=({' '.join(words)})", f"${{{name}[@]}}"),
    "array that grows": lambda name, words, i: (
        f"{name}=()\n" + "".join(f"{name}+=({word})\n" for word in words), f'"${{{name}[@]}}"'),
    "text": lambda name, words, i: (f"export {name}={shlex.quote(' '.join(words))}", f"${name}"),
    "texts in quotes": lambda name, words, i: (
        f"{name}A={words[0]}\n{name}B={shlex.quote(' '.join(words[1:]))}\n{name}=\"${{{name}A}} ${{{name}B}}  $none\"",
        f"${name}"),
    "text that grows": lambda name, words, i: (
        f"{name}=''\n" + "".join(f"{name}+={shlex.quote(' ' + word)}\n" for word in words), f"${{{name}}}"),
    "default": lambda name, words, i: ("", f"${{{name}:-{' '.join(words)}}}"),
    "default before": lambda name, words, i: (f": \"${{{name}:={' '.join(words)}}}\"", f"${name}"),
    "known branch": lambda name, words, i: (
        f"USE_{name}=true\nif [[ $USE_{name} == true ]]; then\n  {name}=({' '.join(words)})\nelse\n  {name}=(x)\nfi",
        f'"${{{name}[@]}}"'),
    "known case": lambda name, words, i: (
        f"case a{i} in b*) {name}=(x) ;; a{i}|c) {name}=({' '.join(words)}) ;; esac", f'"${{{name}[@]}}"'),
    "loop": lambda name, words, i: (
        f"{name}=()\nfor word in {' '.join(words)}; do {name}+=(\"$word\"); done", f'"${{{name}[@]}}"'),
    "function": lambda name, words, i: (
        f"set_{name}() {{\n  local own=x\n  {name}=({' '.join(words)})\n}}\nset_{name}", f'"${{{name}[@]}}"'),
    "read": lambda name, words, i: (f"read -ra {name} <<< \"{' '.join(words)}\"", f'"${{{name}[@]}}"'),
    "positional": lambda name, words, i: (f"set -- {' '.join(words)}", '"$@"'),
}  # fmt: skip
STARTS: dict[str, Callable[[str], str]] = {
    "command": lambda line: line,
    "with a log": lambda line: f"{line} 2>&1 | tee /dev/null",
    "in a branch": lambda line: f"if ! {line}; then\n  exit 1\nfi",
    "in a function": lambda line: f"train() {{\n  {line}\n}}\ntrain",
    "evaluated": lambda line: f"eval {shlex.quote(line)}",
    "of another shell": lambda line: f"bash <<END\n{line}\nEND",
}
COMMAND = {"verl": TRAIN, "ms-swift": "swift rlhf --rlhf_type grpo", "AReaL": "python3 examples/math.py"}


@st.composite
def verl_settings(draw: st.DrawFn) -> dict[str, object]:
    rule = draw(st.sampled_from(["", "token_k3", "seq_mean_k3", "seq_max_k2", "seq_sum_k2"]))
    found: dict[str, object] = {"rollout_is": draw(st.sampled_from(["token", "sequence", "null"]))}
    found["rollout_is_threshold"] = draw(st.sampled_from([2.0, 5, 1.5, "0.5_5.0"]))
    if rule:
        found |= {"rollout_rs": rule, "rollout_rs_threshold": 0.25}
    found["bypass_mode"] = draw(st.sampled_from(["true", "false", "True"]))
    found["loss_type"] = draw(st.sampled_from(["ppo_clip", "reinforce"]))
    return {f"{IS}{key}": value for key, value in found.items()}


SETTINGS = {
    "verl": verl_settings(),
    "ms-swift": st.fixed_dictionaries(
        {MODE: st.sampled_from(sorted(ms_swift.MODES)), THRESHOLD: st.sampled_from([2.0, 1.5, 3])},
        optional={"off_policy_sequence_mask_delta": st.just(0.1), "beta": st.sampled_from([0, 0.04])},
    ),
    "AReaL": st.fixed_dictionaries(
        {"actor.rejection_sampling.upper": st.sampled_from([2.0, 3.5]), "actor.use_decoupled_loss": st.just("true")},
        optional={
            "actor.rejection_sampling.action": st.sampled_from(["mask", "clamp"]),
            "actor.rejection_sampling.lower": st.just(0.5),
            "actor.rejection_sampling.level": st.sampled_from(["token", "sequence"]),
        },
    ),
}
TRANSLATE = {"verl": verl.translate, "ms-swift": ms_swift.translate, "AReaL": areal.translate}


def tree_of(said: dict[str, object]) -> str:
    """A correction as a yaml of the framework, where the framework's own values stand."""
    own: dict[object, object] = {"null": None, "true": True, "false": False, "True": True}
    return as_yaml({path: own[value] if value in own else value for path, value in said.items()})


@pytest.mark.parametrize("framework", SETTINGS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_random_correction_in_a_random_idiom_is_read_back(framework: str, data: st.DataObject, tmp_path_factory):
    said = data.draw(SETTINGS[framework])
    pairs = [[f"--{key}", str(value)] if framework == "ms-swift" else [f"{key}={value}"] for key, value in said.items()]
    at = data.draw(st.integers(0, len(pairs)))
    before, line = "#!/usr/bin/env bash\nset -e\n", COMMAND[framework]
    idioms = data.draw(st.lists(st.sampled_from(sorted(IDIOMS)), min_size=2, max_size=2, unique=True))
    for i, (idiom, part) in enumerate(zip(idioms, (pairs[:at], pairs[at:]), strict=True)):
        if part:
            lines, words = IDIOMS[idiom](f"PART{i}", [word for pair in part for word in pair], i)
            before, line = f"{before}{lines}\n", f"{line} {words}"
    start = data.draw(st.sampled_from(sorted(STARTS)))
    if '"$@"' in line or "[@]" in line and start == "of another shell":
        start = "command"  # an array and "$@" mean another thing there
    script = before + STARTS[start](line) + "\n"
    theirs = given_by_bash(script, COMMAND[framework].split()[0])
    assert theirs and theirs[-1] == pairs[-1][-1]  # the idiom is one
    try:
        expected = TRANSLATE[framework](tree_of(said)).config()
    except ConfigError as error:
        with pytest.raises(ConfigError) as refused:
            TRANSLATE[framework](script)
        assert str(refused.value).split(":")[0].split(" ")[0] == str(error).split(":")[0].split(" ")[0]
        return
    assert TRANSLATE[framework](script).config() == expected


# -------------------------------------------------------------------------------------- read, and asked where several


SWIFT = "swift rlhf --rlhf_type grpo"
ARMS = f"""ARM=${{1:?arm}}
GEO="{RULE}"
case "$ARM" in
  plain) {TRAIN} plain algorithm.gamma=1 ;;
  geo)   {TRAIN} geo $GEO algorithm.gamma=1 ;;
  both)  {TRAIN} both {WEIGHT} $GEO ;;
esac
"""
BRANCHES = (
    f'if [ "$MOE" = 1 ]; then\n{SWIFT} --{MODE} sequence_mask --{THRESHOLD} 1.5\n'
    f"else\n{SWIFT} --{MODE} token_truncate\nfi"
)
OPEN = f'{TRAIN} {IS}rollout_is="$ROLLOUT_IS" {IS}rollout_is_threshold="${{ROLLOUT_IS_THRESHOLD}}" {IS}rollout_rs="$1"'
EDITED = f"sed -i 's/rollout_is: .*/rollout_is: token/' a.yaml\n{TRAIN} "
CAPPED = "{use_decoupled_loss: true, behav_imp_weight_cap: 5}"
M2 = f"actor: {CAPPED[:-1]}, m2_threshold: 0.04}}"
TOKEN_MASK = WeightConfig("token", "zero", 0.0, 3.0)
Expected = CorrectionConfig | WeightConfig | str
# translator, script or yaml, what stands behind it, what else the user says, and the config, its weight, or an error
GIVEN: list[tuple[ModuleType, str, Sequence[str], Asked, Expected]] = [
    *((verl, script, (), ASKED, BOTH) for script in (
        f'RS="{RULE}"\n{TRAIN} {WEIGHT} $RS',
        f'A=({WEIGHT})\nB=({RULE})\n{TRAIN} "${{A[@]}}" "${{B[@]}}"',
        f'K={IS}rollout_\n{TRAIN} ${{K}}is=token +$K"is_threshold"=2.0 {RULE}',
        f'train() {{ {TRAIN} "$@" {RULE}; }}\ntrain {WEIGHT}',
        f"srun --nodes 2 bash -lc '{TRAIN} {WEIGHT} {RULE}'",
        f"if [ $NODES = 1 ]; then {TRAIN} {WEIGHT} {RULE}; else torchrun -m verl.trainer.main_ppo {WEIGHT} {RULE}; fi",
        f"{TRAIN} '{IS.strip('.')}={{rollout_is:token,rollout_is_threshold:2.0,rollout_rs:seq_mean_k1,"
        f"rollout_rs_threshold:0.99_1.01}}'",
        f"{TRAIN} {WEIGHT} {RULE} ${{WANDB:+trainer.logger=wandb}} ${{MORE[*]}}\npython -m verl.main_eval data.n=1",
        f"# {IS}rollout_is=sequence\necho '{IS}rollout_is=sequence'\n{TRAIN} {WEIGHT} {RULE} \"$@\"",
        f": <<'OFF'\n{TRAIN} {IS}rollout_is=sequence\nOFF\nshift 2\n{TRAIN} {WEIGHT} {RULE}",
        f'USAGE="x"\nusage() {{\n  cat <<EOF\n{IS}rollout_is=MODE\nEOF\n}}\n{TRAIN} {WEIGHT} {RULE} $EXTRA',
    )),
    (verl, ARMS, (), ASKED,
     r"3 starts of verl .*--line N.*line 4, .*nothing of the correction; line 5, .*; line 6, .*is both"),
    (verl, ARMS, (), Asked(line=6), BOTH),
    (verl, ARMS, (), Asked(arguments=("geo",)), CorrectionConfig(None, MEAN)),
    *((verl, ARMS, (), asked, "nothing that runs corrects, and yet there are .* line [256]")
      for asked in (Asked(line=4), Asked(arguments=("plain",)))),
    (verl, "rollout_is: token", (), Asked(line=1), "--line, and arguments behind --, belong to a launch script"),
    # what only the launch decides is listed at once and whole
    (verl, f"{OPEN} data.n=$N", (), ASKED,
     r"decides rollout_is: \$ROLLOUT_IS, rollout_is_threshold: \$\{ROLLOUT_IS_THRESHOLD\}, rollout_rs: \$1; put "
     f".*{IS}rollout_is=VALUE {IS}rollout_is_threshold=VALUE"),
    (verl, f"{OPEN} data.n=$N", (f"{IS}rollout_is=token", f"{IS}rollout_is_threshold=2", f"{IS}rollout_rs=null"), ASKED,
     WeightConfig(upper=2.0)),
    (verl, f"{OPEN} data.n=$N", (), Asked(arguments=("ROLLOUT_IS=token", "ROLLOUT_IS_THRESHOLD=3", "null")),
     WeightConfig(upper=3.0)),
    (verl, f"{TRAIN} $1 {IS}rollout_is=token", (), Asked(arguments=(f"{IS}rollout_is=sequence",)),
     WeightConfig(upper=2.0)),  # the last wins, as in Hydra
    # where there are fewer, none is shifted
    *((verl, f'shift 2\n{TRAIN} {IS}rollout_is=token "$@"', (),
       Asked(arguments=(*words, f"{IS}rollout_is_threshold=3")), WeightConfig(upper=3.0)) for words in ((), "ab")),
    (verl, f'shift $N\n{TRAIN} {WEIGHT} "$@"', (), Asked(arguments=("a",)), r"would tell shift \$N \(line 2"),
    *((verl, f'{loop}\n{TRAIN} {WEIGHT} "$@"', (), Asked(arguments=("a", f"{IS}rollout_is_threshold=3")),
       r"would tell \$@ \(line 2") for loop in ("until [ $# -eq 0 ]; do shift; done", "while shift; do A=$1; done")),
    (verl, f"shopt -s nocasematch\nA=B\ncase $A in b) T=2 ;; *) T=3 ;; esac\n{TRAIN} {IS}rollout_is=token "
     f"{IS}rollout_is_threshold=$T", (), ASKED, "decides rollout_is_threshold: 2 .*if B is b"),
    (verl, f"train() {{\n  {TRAIN} {IS}rollout_is=$1\n}}\n(train token)", (), ASKED, WeightConfig(upper=2.0)),
    # `command` and `builtin` pass functions of the script by
    *((verl, f"T=2\n{line}\n{TRAIN} {IS}rollout_is=token {IS}rollout_is_threshold=$T", (), ASKED, expected)
      for line, expected in (
          ("command eval T=3", WeightConfig(upper=3.0)), ("builtin read T <<< 3", WeightConfig(upper=3.0)),
          ('cd() { builtin cd "$@"; T=3; }\ncd /', WeightConfig(upper=3.0)),
          ("command -v T=3", WeightConfig(upper=2.0)), ("command -p -- eval T=3", WeightConfig(upper=3.0)),
          ("trap - DEBUG", WeightConfig(upper=2.0)), ("trap 'T=3' debug", r"decides rollout_is_threshold: \$T"),
          ("shopt nocasematch; case A in a) T=3;; esac", WeightConfig(upper=2.0)),
          ("shopt -s nocasematch; shopt nocasematch; case A in a) T=3;; esac", "decides rollout_is_threshold"),
          ("builtin export T=3", r"decides rollout_is_threshold: \$T"),
          ("trap 'T=3' DEBUG", r"decides rollout_is_threshold: \$T"))),
    # a later round of a loop, and another name of an array
    (verl, f"T=2\nwhile next; do {TRAIN} {IS}rollout_is=token {IS}rollout_is_threshold=$T; T=5; done", (), ASKED,
     "2 starts of verl with different settings"),
    (verl, f"declare -n R=A\nA=({WEIGHT})\nR+=({IS}rollout_is_threshold=5)\n{TRAIN} ${{A[@]}}", (), ASKED,
     r"not read: R\+="),
    # branches are asked, and overrides win
    (ms_swift, BRANCHES, (), ASKED, "2 starts of ms-swift .*line 2, only if .*sequence_mask.*line 4, .*token_tru"),
    (ms_swift, BRANCHES, (f"{MODE}=token_mask", f"{THRESHOLD}=3"), ASKED, TOKEN_MASK),
    (ms_swift, BRANCHES, (), Asked(line=4), WeightConfig()),
    (ms_swift, BRANCHES, (), Asked(arguments=("MOE=1",)),
     CorrectionConfig(WeightConfig("token", "none", None, None), (RejectRule(over="mean", upper=1.5),))),
    (ms_swift, BRANCHES, ("nope=1",), ASKED, "override 'nope=1': expected KEY=VALUE"),
    # what sets up a shell, and a last line that goes on, hide no setting
    *((ms_swift, script.format(mode=MODE, swift=SWIFT), (), ASKED, WeightConfig()) for script in (
        'A="--{mode} token_truncate"\neval "$(conda shell.bash hook)"\nconda activate x\n{swift} $A',
        'A="--{mode} token_truncate"\neval "$(/opt/bin/micromamba shell hook -s bash 2>/dev/null)"\n{swift} $A',
        "{swift} --{mode} token_truncate \\\n", "{swift} --{mode} token_truncate \\",
    )),
    # no key of a correction stands in the script, and one may stand in what the command prints
    *((module, f"#!/bin/bash\nMORE=$(cat more.txt)\n{start} $MORE\n", (), ASKED,
       r"only running the script would tell \$\(cat more\.txt\)") for module, start in (
        (verl, "python3 -m verl.trainer.main_ppo trainer.nnodes=1"), (ms_swift, "swift rlhf --rlhf_type grpo"),
        (areal, "python3 -m areal.launcher.local train.py --config grpo.yaml"),
    )),
    *((module, f"MORE=$(cat more.txt)\npython {file} $MORE {word}", (), ASKED, r"would tell \$\(cat more\.txt\)")
      for module, file, word in (
        (verl, "mine.py", f"{IS}rollout_is=token"), (areal, "mine.py", "--config grpo.yaml"),
        (trl, "mine.py", "--config grpo.yaml"),
    )),
    (verl, f"for T in 2 5; do {TRAIN} {IS}rollout_is=token {IS}rollout_is_threshold=$T; done", (), ASKED,
     "2 starts of verl with different settings; start the script as"),  # all in one line
    (verl, f"{TRAIN} trainer.experiment_name=gsm8k-rollout_is-2 {WEIGHT}", (), ASKED, WeightConfig(upper=2.0)),
    # a key that an override gives may stand anywhere
    *((verl, f"{EDITED}{word}", (), ASKED, "rollout_is in line 1")
      for word in (f"{IS}rollout_is=token", "algorithm.gamma=1")),
    *((verl, f"{EDITED}{word}", (f"{IS}rollout_is=sequence",), ASKED, WeightConfig("sequence", upper=2.0))
      for word in (f"{IS}rollout_is=token", "algorithm.gamma=1")),
    # a value that another machine or the launch gives is asked
    *((verl, script, (), ASKED, "only the launch decides rollout_is_threshold") for script in (
        f"srun --export=ALL,T=5 bash -c '{TRAIN} {IS}rollout_is=token {IS}rollout_is_threshold=${{T:-2}}'",
        f"export T=5\nssh n bash <<'E'\n{TRAIN} {IS}rollout_is=token {IS}rollout_is_threshold=${{T:-2}}\nE",
        f'T=${{1:-}}\n[ -z "$T" ] && exit 1\n{TRAIN} {IS}rollout_is=token {IS}rollout_is_threshold=$T',
    )),
    # overrides reach a key where it stands
    *((areal, text, (word,), ASKED, WeightConfig("token", "zero", 0.0, 4.0)) for text in (CAPPED, f"actor: {CAPPED}")
      for word in ("behav_imp_weight_cap=4", "actor.behav_imp_weight_cap=4")),
    (areal, M2, ("actor.m2_threshold=null",), ASKED, areal.translate(f"actor: {CAPPED}").config()),
    *((areal, "actor: {use_decoupled_loss: true, rejection_sampling: {upper: 3}}", (word,), ASKED,
       CorrectionConfig()) for word in ("actor.rejection_sampling=null", "rejection_sampling=null")),
    (areal, M2, ("lr=1",), ASKED, "override 'lr=1': expected actor.KEY=VALUE"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "script", "behind", "asked", "expected"), GIVEN)
def test_a_script_is_translated_or_refused_in_words(
    module: ModuleType,
    script: str,
    behind: Sequence[str],
    asked: Asked,
    expected: CorrectionConfig | WeightConfig | str,
) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            module.translate(script, behind, asked=asked)
        return
    config = module.translate(script, behind, asked=asked).config()
    assert (config.weight if isinstance(expected, WeightConfig) else config) == expected


def test_a_key_of_an_arm_that_does_not_run_is_told() -> None:
    geo = verl.translate(ARMS, asked=Asked(arguments=("geo",)))
    assert any(note.startswith("not read, since it does not count: rollout_is") for note in geo.notes)


def test_verl_bypass_in_variables_and_its_copy_in_the_loss() -> None:
    keys = {"bypass_mode": "True", "loss_type": "ppo_clip", "rollout_is": "null", "rollout_rs": "seq_mean_k3",
            "rollout_rs_threshold": "0.005"}  # fmt: skip
    lines = "".join(f"{key}=${{{key}:-{value}}}\n" for key, value in keys.items())
    copies = [f"+{ACTOR}policy_loss.rollout_correction.{key}=${{{key}}}" for key in keys]
    words = " ".join([*copies, *(f"{IS}{key}=${{{key}}}" for key in keys)])
    script = f"{lines}{TRAIN} {ACTOR}policy_loss.loss_mode=bypass_mode {words}"
    expected = CorrectionConfig(
        None, (RejectRule("k3", "mean", upper=0.005),), objective=ObjectiveConfig(old="behavior")
    )
    for behind in ([], [f"{ACTOR}policy_loss.loss_mode=bypass_mode"]):
        assert verl.translate(script, behind).config() == expected
    with pytest.raises(ConfigError, match="rollout_rs_threshold: 0.01 contradicts algorithm.rollout_correction"):
        verl.translate(script.replace("policy_loss.rollout_correction.rollout_rs_threshold=${rollout_rs_threshold}",
                                      "policy_loss.rollout_correction.rollout_rs_threshold=0.01"))  # fmt: skip


def test_ms_swift_an_unknown_flag_of_the_loss_is_no_refusal() -> None:
    script = f'ARGS=(\n  --beta "${{REF_BETA}}"\n  --{MODE} token_truncate\n)\n{SWIFT} "${{ARGS[@]}}"'
    made = ms_swift.translate(script)
    assert made.config().weight == WeightConfig()
    assert "beta: ${REF_BETA} is for the launch to decide" in made.text()
    with pytest.raises(ConfigError, match=r"decides beta: \$\{REF_BETA\}; .*beta=VALUE"):  # the mask hits the KL too
        ms_swift.translate(script + " --off_policy_sequence_mask_delta 0.1")


@pytest.mark.parametrize("line", ["source env.sh", "export $(grep -v '^#' .env | xargs)", 'declare -g "$k=$v"'])
def test_a_default_that_an_unread_file_may_replace_is_told(line: str) -> None:
    note, *_ = ms_swift.translate(f"{line}\n{SWIFT} --{MODE} ${{M:-token_mask}}").notes
    assert note.startswith("taken for granted: M is not set") and note.endswith(f"and may set them: {line}.")


def test_a_sourced_file_is_read_where_it_is_found(tmp_path: Path) -> None:
    (tmp_path / "args.sh").write_text(f"ARGS=(--{MODE} token_mask)\nMORE=(--{THRESHOLD} 3)\n")
    script = f'source "$(dirname "$0")/args.sh"\n{SWIFT} "${{ARGS[@]}}"'
    made = ms_swift.translate(script, asked=Asked(tmp_path / "run.sh"))
    assert made.config().weight == WeightConfig("token", "zero", 0.0, 2.0)
    assert any(f"{THRESHOLD} in line 2 of a sourced" in note and "nothing reads" in note for note in made.notes)


def test_a_sourced_file_is_read_from_the_folder_that_the_script_changes_to(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "env.sh").write_text("M=token_mask\n")
    (tmp_path / "sub" / "env.sh").write_text("M=token_truncate\n")
    start = f"{SWIFT} --{MODE} $M --{THRESHOLD} 3"
    asked = Asked(tmp_path / "run.sh")
    for lines, bound in (("", "zero"), ("( cd sub )\n", "zero"), ("cd sub\n", "truncate")):
        script = f'cd "$(dirname "${{BASH_SOURCE[0]}}")"\n{lines}source ./env.sh\n{start}'
        weight = ms_swift.translate(script, asked=asked).config().weight
        assert weight is not None and weight.bound == bound


# ------------------------------------------------------------------------------------ a yaml that a script names

HYDRA = f"{TRAIN} --config-path"
AREAL = "python3 -m areal.launcher.local examples/math/grpo.py --config"


@pytest.mark.parametrize("folder", [".", "configs", "$(pwd)/configs", "${PWD}"])
@pytest.mark.parametrize("started_in", [".", "scripts/grpo"])
def test_a_yaml_that_a_script_names_is_read_from_its_folder_or_one_above(
    folder: str, started_in: str, tmp_path: Path
) -> None:
    for place in (tmp_path, tmp_path / "configs", tmp_path / started_in):
        place.mkdir(exist_ok=True, parents=True)
    at = tmp_path / ("configs" if "configs" in folder else ".")
    mis = {"rollout_is": "token", "rollout_is_threshold": 3}
    (at / "verl.yaml").write_text(yaml.safe_dump({"algorithm": {"rollout_correction": mis}}))
    (at / "swift.yaml").write_text(f"{MODE}: token_truncate\n{THRESHOLD}: 3\n")
    (at / "areal.yaml").write_text("actor: {use_decoupled_loss: true, rejection_sampling: {action: clamp, upper: 3}}")
    asked = Asked(tmp_path / started_in / "run.sh")
    read = f"read too: {at / 'verl.yaml'}, as it is now."
    for script in (
        f"{HYDRA}=\"{folder}\" --config-name='verl' trainer.nnodes=1",
        f"DIR={folder}\n{TRAIN} -cp $DIR -cn verl.yaml algorithm.gamma=1",
    ):
        made = verl.translate(script, asked=asked)
        assert made.config().weight == WeightConfig(upper=3.0) and read in made.notes
    assert verl.translate(f"{script} {IS}rollout_is=sequence", asked=asked).config().weight == WeightConfig(
        "sequence", upper=3.0
    )
    for word in ("", "--config "):
        made = ms_swift.translate(f"swift rlhf {word}{folder}/swift.yaml --beta 0", asked=asked)
        assert made.config().weight == WeightConfig(upper=3.0)
    made = areal.translate(f"{AREAL} {folder}/areal.yaml +actor.rejection_sampling.upper=4", asked=asked)
    assert made.config().weight == WeightConfig(bound="clip", lower=0.0, upper=4.0)


def test_a_yaml_that_is_not_here_is_told_beside_what_the_command_says() -> None:
    made = verl.translate(f"{TRAIN} --config-name=mine {WEIGHT}")
    assert made.config().weight == WeightConfig(upper=2.0)
    told = "not read: settings in mine.yaml, a yaml that is not here; those that count go behind the file."
    assert told in made.notes
    own = verl.translate(f"{HYDRA}=config --config-name='ppo_megatron_trainer.yaml' {WEIGHT}")
    assert own.config() == made.config() and not any("not read" in note for note in own.notes)


@pytest.mark.parametrize(
    "line",
    ["cp b.yaml a.yaml", "sed -i s/token_mask/token_truncate/ a.yaml", "yq -i .beta=0 a.yaml", "mv b.yaml ./a.yaml",
     "sed -i s/sk/s/ *.yaml", "find . -name 'a*' -exec sed -i s/mask/truncate/ {} +", "python edit.py ./a.yaml",
     "python -c \"open('a.yaml', 'a').write('beta: 0')\"", "python - <<P\nopen('a.yaml', 'a').write('beta: 0')\nP"],
)  # fmt: skip
def test_a_yaml_that_the_script_changes_is_not_taken_for_read(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{MODE}: token_mask")
    told = "yet there are settings in a.yaml, which the script writes or changes"
    with pytest.raises(ConfigError, match=told):
        ms_swift.translate(f"{line}\n{SWIFT} --config a.yaml", asked=Asked(tmp_path / "run.sh"))


def test_a_yaml_counts_as_it_is_when_the_training_starts() -> None:
    write, start = f"cat > /tmp/a.yaml <<E\n{MODE}: token_{{}}\nE\n", f"{SWIFT} --config /tmp/a.yaml\n"
    mask, truncate = write.format("mask") + start, write.format("truncate")
    assert ms_swift.translate(f"{mask}rm /tmp/a.yaml").mis["weight"]["bound"] == "zero"
    with pytest.raises(ConfigError, match="2 starts of ms-swift with different settings"):
        ms_swift.translate(f"{mask}{truncate}{start}")
    assert ms_swift.translate(f"{mask}{truncate}{start}", asked=Asked(line=8)).mis["weight"]["bound"] == "truncate"


def test_a_yaml_is_read_from_the_folder_that_the_script_changes_to(tmp_path: Path) -> None:
    for folder, mode in ((tmp_path, "token_mask"), (tmp_path / "sub", "token_truncate")):
        folder.mkdir(exist_ok=True)
        (folder / "a.yaml").write_text(f"{MODE}: {mode}")
    made = ms_swift.translate(
        f"cd sub\npython data.py --config a.yaml\ncp a.yaml out/\n{SWIFT} --config a.yaml",
        asked=Asked(tmp_path / "run.sh"),
    )
    assert made.mis["weight"]["bound"] == "truncate"


@pytest.mark.parametrize(
    ("before", "name", "behind", "is_sure"),
    [
        ("python edit.py a.yaml", "a.yaml", "python edit.py a.yaml", False),
        ("xargs sed -i s/a/b/ b.yaml", "a.yaml", "xargs sed -i s/a/b/ a.yaml", False),
        ("python edit.py a.yaml", "a.yaml", "", True),
        ("", "other_a.yaml", "python check.py a.yaml", True),
        ("", "conf[1].yaml", "", True),
        ("", "a.yaml", "apt-get install -y sed", True),
    ],
)
def test_the_last_that_a_script_does_to_its_yaml_counts(before: str, name: str, behind: str, is_sure: bool) -> None:
    script = f"{before}\ncat > '{name}' <<E\n{MODE}: token_mask\nE\n{behind}\n{SWIFT} --config '{name}'"
    with (
        nullcontext() if is_sure else pytest.raises(ConfigError, match="no start of ms-swift that can be read is given")
    ):
        assert ms_swift.translate(script).mis["weight"]["bound"] == "zero"


def test_trl_a_yaml_is_read_whatever_the_name_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("use_vllm: true\nvllm_importance_sampling_mode: token_truncate")
    servers = "trl vllm-serve --config v.yaml &\nvllm serve --config v.yaml &\n"
    script = f"{servers}python sft.py --config b.yaml\naccelerate launch --config_file c.yaml train.py --config"
    for sign in " =":
        made = trl.translate(f"{script}{sign}a.yaml", ["beta=0"], asked=Asked(tmp_path / "run.sh"))
        read = f"read too: {tmp_path / 'a.yaml'}, as it is now."
        assert made.mis["weight"]["level"] == "token" and read in made.notes


OF_VERL = (verl.translate, "algorithm: {rollout_correction: {rollout_is: token}}")
OF_AREAL = (areal.translate, "actor: {use_decoupled_loss: true, rejection_sampling: {upper: 3.0}}")
BASES = [
    *((*OF_VERL, base) for base in ("mine", "x: mine", "actor@actor_rollout_ref.actor: [dp_actor, mine]")),
    (*OF_VERL, "algorithm@algorithm.rollout_correction: mine"),
    *((*OF_AREAL, base) for base in ("mine", "recipe: mine", "actor@actor: mine", "mine@_global_: mine")),
]


@pytest.mark.parametrize(("translate", "setting", "base"), BASES)
def test_a_yaml_on_a_base_of_the_users_own_proves_nothing(translate: Callable, setting: str, base: str) -> None:
    defaults = f"defaults:\n- {base}\n- _self_\n"
    with pytest.raises(ConfigError, match="yet there are settings in mine, which `defaults` names"):
        translate(f"{defaults}data: {{n: 1}}")
    assert "not read: settings in mine, which `defaults`" in " ".join(translate(defaults + setting).notes)


def test_a_yaml_that_the_script_writes_is_read() -> None:
    script = f"cat > /tmp/a.yaml <<EOF\n{MODE}: token_mask\nEOF\n{SWIFT} --config /tmp/a.yaml"
    made = ms_swift.translate(script)
    assert made.config().weight == WeightConfig("token", "zero", 0.0, 2.0)
    assert "read too: /tmp/a.yaml, which the script writes." in made.notes
    indented = script.replace("<<", "<<-").replace(MODE, f"\t\t{MODE}").replace("\nEOF", "\n\tEOF")
    assert ms_swift.translate(indented).config() == made.config()
    with pytest.raises(ConfigError, match=f"{MODE}: token_truncate contradicts token_mask in the yaml"):
        ms_swift.translate(f"{script} --{MODE} token_truncate")
    with pytest.raises(ConfigError, match="2 starts of ms-swift .*line 4: .*the yaml /tmp/a.yaml; line 5: .* b.yaml"):
        ms_swift.translate(f"{script}\n{SWIFT} --config b.yaml")


def test_the_command_takes_overrides_a_line_and_the_scripts_own_arguments(tmp_path: Path, capsys) -> None:
    script = tmp_path / "arms.sh"
    script.write_text(ARMS)
    for given_ in (["--line", "6"], ["--", "both"]):
        assert main(["config", "from-verl", str(script), *given_]) == 0
        assert "upper: 2.0" in capsys.readouterr().out
    script.write_text(f"{SWIFT} --{MODE} $MODE")
    assert main(["config", "from-ms-swift", str(script)]) == 2
    assert f"as {MODE}=VALUE" in capsys.readouterr().err
    assert main(["config", "from-ms-swift", str(script), f"{MODE}=token_mask"]) == 0


def test_a_parser_that_crashes_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar, "version", lambda _: "0.25.2")
    with pytest.raises(ConfigError, match=r"tree-sitter 0\.25\.2 crashes .* 'tree-sitter>=0\.26\.1'"):
        grammar.check_version.__wrapped__()
    assert (Path(__file__).parents[2] / "setup.py").read_text().count(f'"tree-sitter>={grammar.OLDEST}"') == 2


def test_without_the_parser_of_bash_a_yaml_works_and_a_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tree_sitter", None)
    assert verl.translate("rollout_is: token").config().weight == WeightConfig(upper=2.0)
    with pytest.raises(ConfigError, match=r"tree_sitter is not installed; pip install 'mis-plugins\[scripts\]'"):
        verl.translate(f"#!/bin/bash\n{TRAIN} {WEIGHT}")
