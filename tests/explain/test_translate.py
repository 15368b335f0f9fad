"""Configs of other frameworks, translated: what they mean here, what is said of the rest, what is refused."""

import gzip
import io
import re
import sys
from pathlib import Path

import pytest
import yaml
from commands import ConfigCommand
from documented import DEFAULTS, GEO, TOKEN_IS, VERL

from mis_plugins.__main__ import COMMANDS, TRANSLATORS, load, main
from mis_plugins.config.loading import preset_path
from mis_plugins.config.model import CorrectionConfig, ObjectiveConfig, RejectRule, WeightConfig
from mis_plugins.config.reading import from_mapping
from mis_plugins.errors import ConfigError
from mis_plugins.explain.translate import areal, ms_swift, prime_rl, trl, verl
from mis_plugins.explain.translate.script import Asked
from mis_plugins.explain.translate.translation import Translation

MODE, THRESHOLD = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"


def preset(name: str) -> CorrectionConfig:
    return load(preset_path(name))


def read_back(translation: Translation, folder: Path) -> CorrectionConfig:
    """As the host would, from the text that the command prints."""
    file = folder / "translated.yaml"
    file.write_text(translation.text())
    return load(file)


FRAMEWORKS = {"verl": verl, "ms-swift": ms_swift, "AReaL": areal, "TRL": trl, "prime-rl": prime_rl}


def made_of(framework: str, case: dict) -> Translation:
    """The translation of what a file says, as text or as a tree, and of what stands behind it."""
    text = case["said"] if isinstance(case["said"], str) else yaml.safe_dump(case["said"], sort_keys=False)
    return FRAMEWORKS[framework].translate(text, case.get("behind", ()))


def cases(file: str) -> pytest.MarkDecorator:
    by_framework = yaml.safe_load(Path(__file__).with_name(file).read_text())
    table = [(framework, case) for framework in by_framework for case in by_framework[framework]]
    return pytest.mark.parametrize(("framework", "case"), table, ids=lambda value: str(value)[:60])


@cases("translated.yaml")
def test_what_a_file_means_and_what_is_said_of_the_rest(framework: str, case: dict, tmp_path: Path):
    made = made_of(framework, case)
    if "preset" in case or "mis" in case:
        meant = preset(case["preset"]) if "preset" in case else from_mapping(case["mis"])
        assert made.config() == meant == read_back(made, tmp_path)
    notes = " ".join(made.notes)
    assert [words for words in case.get("told", ()) if words not in notes] == []
    assert [words for words in case.get("untold", ()) if words in notes] == []
    assert [words for words in case.get("written", ()) if words not in made.text()] == []


@cases("refused.yaml")
def test_what_cannot_be_translated_is_refused(framework: str, case: dict):
    """By the user's own keys."""
    with pytest.raises(ConfigError, match=case["told"]):
        made_of(framework, case).text()


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
OF_VERL = ("{}", "{}()", "RolloutCorrectionConfig.{}()", "rollout_correction: {}()")
OF_SWIFT = (
    f"{MODE}: {{}}",
    f"--{MODE}: {{}}\n--log_rollout_offpolicy_metrics: true",
    f"swift rlhf --rlhf_type grpo \\\n    --{MODE} {{}} \\\n    --{THRESHOLD} 2.0\n",
    f"swift rlhf --rlhf_type grpo --{MODE}={{}} --beta=0.04",
)
OF_TRL = (f"{trl.MODE}: {{}}\n", f"trl grpo --{trl.MODE} {{}}", f"trl grpo --{trl.MODE}={{}}",
          f"GRPOConfig({trl.MODE}='{{}}', use_vllm=True)")  # fmt: skip
PRESETS = [
    *(("verl", name, form.format(name)) for name in VERL for form in OF_VERL),
    *(("verl", name, keys) for name, own in VERL.items()
      for keys in (own, DEFAULTS | own, {"algorithm": {"gamma": 1.0, "rollout_correction": own}})),
    *(("ms-swift", mode, form.format(mode)) for mode in MODES for form in OF_SWIFT),
    *(("TRL", mode, form.format(mode)) for mode in MODES for form in OF_TRL),
]  # fmt: skip


@pytest.mark.parametrize(("framework", "name", "content"), PRESETS, ids=lambda value: str(value)[:60])
def test_frameworks_modes_become_our_presets(framework: str, name: str, content: str | dict, tmp_path: Path):
    made = made_of(framework, {"said": content})
    assert made.config() == preset(f"{framework.lower()}-{name.replace('_', '-')}") == read_back(made, tmp_path)


# ------------------------------------------------------------------------------------------------------------- verl


PREFIX = "algorithm.rollout_correction."
IS = f"{PREFIX}rollout_is=token"


def test_verl_each_rule_stands_beside_its_own_words():
    both = {"rollout_rs": "token_k3,seq_mean_k1", "rollout_rs_threshold": "0.5,0.5_4"}
    text = verl.translate(yaml.safe_dump(both)).text()
    assert re.findall(r"^ *- .*?# (.*)$", text, re.MULTILINE) == [
        "rollout_rs: token_k3, rollout_rs_threshold: 0.5",
        "rollout_rs: seq_mean_k1, rollout_rs_threshold: 0.5_4",
    ]


def test_verl_dppo_of_a_launch_script():
    script = (
        "MODE=dppo_kl\nACTOR=(\n    actor_rollout_ref.actor.policy_loss.loss_mode=${MODE}\n"
        "    actor_rollout_ref.actor.clip_ratio_low=${LOW:-0.05}\n)\npython3 -m verl ${ACTOR[@]}\n"
    )
    by_default = " ".join(verl.translate(script).notes)
    assert "--eps-clip 0.05" in by_default and "taken for granted: LOW is not set" in by_default
    with pytest.raises(
        ConfigError, match=r"decides clip_ratio_low: \$LOW; .*actor_rollout_ref.actor.clip_ratio_low=VALUE"
    ):
        verl.translate(script.replace("${LOW:-0.05}", "$LOW"))
    said = verl.translate(script, ["actor_rollout_ref.actor.clip_ratio_low=0.05"])
    assert said.config().objective == ObjectiveConfig("dppo_kl")
    assert "--eps-clip 0.05 --eps-clip-high 0.2" in " ".join(said.notes)


def test_verl_a_preset_from_the_command_line(capsys: pytest.CaptureFixture):
    assert main(["config", "from-verl", "decoupled_token_is(threshold=3.5)", f"{PREFIX}rollout_rs=null"]) == 0
    assert "upper: 3.5" in capsys.readouterr().out


# --------------------------------------------------------------------------------- verl, launch scripts and presets

SCRIPT = f"""#!/usr/bin/env bash
set -xeuo pipefail
source ~/.bashrc
export rollout_is="sequence"   # level
threshold=3.0
rollout_rs='token_k1,seq_max_k2'
lower=0.6; echo "never sure"
python3 -m verl.trainer.main_ppo \\
    data.train_files="${{TRAIN_FILE}}" \\
    {PREFIX}rollout_is=${{rollout_is}} \\
    +{PREFIX}rollout_is_threshold=$threshold \\
    {PREFIX}rollout_rs=\\'${{rollout_rs}}\\' \\
    {PREFIX}rollout_rs_threshold="'0.6_1.6,2.5'" \\
    trainer.logger='["console","wandb"]'
echo "rollout_is: ${{rollout_is}}, done if it's over"
"""


def test_verl_launch_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(SCRIPT.encode())))
    assert main(["config", "from-verl", "-"]) == 0
    assert "upper: 3.0" in capsys.readouterr().out
    config = verl.translate(SCRIPT).config()
    assert config.weight == WeightConfig("sequence", "truncate", upper=3.0)
    assert config.reject == (RejectRule(over="token", lower=1 / 1.6, upper=1 / 0.6), RejectRule("k2", "max", upper=2.5))
    overridden = verl.translate(SCRIPT, [f"{PREFIX}rollout_is_threshold=5"]).config().weight
    assert overridden == WeightConfig("sequence", "truncate", upper=5.0)


THRESHOLDED = f"\npython3 -m verl {IS} {PREFIX}rollout_is_threshold="


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("threshold=3.0\nsource other.sh", "$threshold"),
        ("threshold=3.0\neval $(cat other.sh)", "$threshold"),
        ("threshold=3.0\nread threshold", "read threshold"),
        ("threshold=3.0\n((threshold+=1))", "threshold+=1"),
        ("threshold=3.0\nlet threshold=5", "let threshold=5"),
        ("for threshold in 1 3; do if x; then break; fi; done", "$threshold"),
        ("threshold=3.0\nwhile x; do threshold=4; continue; done", "$threshold"),
        ("threshold=3.0\nprintf -v threshold 5", "printf -v threshold 5"),
        ("threshold=$1", "$1"),
        ("threshold=$(cat file)", "$(cat file)"),
        ("threshold=${PAIR%_*}", "${PAIR%_*}"),
        ("if [ $A = b ]; then threshold=3; else threshold=4; fi", "3 (if [ $A = b ]) or 4 (if not: [ $A = b ])"),
        ("set_it() {\n  threshold=3.0\n}", "${threshold}"),
        ("cat > env.sh <<'EOF'\nthreshold=3.0\nEOF", "${threshold}"),
        ("threshold=3.0 python other.py", "${threshold}"),
        ("", "${threshold}"),
    ],
)
def test_verl_a_variable_that_is_not_sure_is_refused(lines: str, said: str):
    """A wrong bound would be worse: the error quotes the user's text and says how to give the value."""
    script = f"{lines}{THRESHOLDED}${{threshold}}"
    told = rf"decides rollout_is_threshold: {re.escape(said)}; .*{PREFIX}rollout_is_threshold=VALUE"
    with pytest.raises(ConfigError, match=told):
        verl.translate(script)
    assert verl.translate(script, [f"{PREFIX}rollout_is_threshold=3"]).config().weight == WeightConfig(upper=3.0)


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ("if true; then\n  threshold=3.0\nfi", "$threshold"),
        ("threshold=2.0\nif true; then\n  threshold=3.0\nfi", "$threshold"),
        ("for threshold in 1 3; do :; done", "$threshold"),
        ("threshold=3.0\n: ${threshold:=4.0}", "$threshold"),
        ("true && threshold=3.0", "$threshold"),
        ("threshold=${THRESHOLD:-3.0}", "$threshold"),
        ("threshold=3.0", "${threshold:-2}"),
        ("", "${THRESHOLD:-3}"),
        ("threshold=3\nset_it() { local threshold=5; }\nset_it", "$threshold"),
        ("set_it() { threshold=3; }\nset_it", "$threshold"),
        ("threshold=3.\nthreshold+=0", '"$threshold"'),
        ("set -- a 3", "$2"),
        ("a=3\nthreshold=${a}.0", '"${threshold}"'),
    ],
)
def test_verl_a_variable_is_read_where_its_value_stands_in_the_script(lines: str, word: str):
    translation = verl.translate(f"{lines}{THRESHOLDED}{word}")
    assert translation.config().weight == WeightConfig(upper=3.0)
    assert ("THRESHOLD is not set" in " ".join(translation.notes)) == ("THRESHOLD:-" in lines + word)


# --------------------------------------------------------------------------------------------------------- ms-swift


def test_ms_swift_by_its_document(tmp_path: Path, capsys: pytest.CaptureFixture):
    """`sequence_mask` weighs a kept sequence by its geometric mean; of another mode the flag has no effect."""
    (tmp_path / "a.yaml").write_text(f"{MODE}: sequence_mask")
    assert main(["config", "from-ms-swift", str(tmp_path / "a.yaml"), "--as-documented"]) == 0
    (tmp_path / "ours.yaml").write_text(capsys.readouterr().out)
    assert load(tmp_path / "ours.yaml") == preset("ms-swift-sequence-mask-as-documented")
    with pytest.raises(ConfigError, match="^--as-documented has no effect without .*: sequence_mask"):
        ms_swift.translate(f"{MODE}: token_mask", as_documented=True)


# -------------------------------------------------------------------------------------------------------------- TRL

CALL = "config = trl.GRPOConfig(\n    use_vllm=True, vllm_importance_sampling_clip_max={value},\n)\n{more}"


def test_a_python_script_is_read_and_never_run(tmp_path: Path):
    script = Asked(tmp_path / "train.py")
    text = "raise SystemExit\n" + CALL.format(value="2.0", more="print('\\d')\n")
    made = trl.translate(text, asked=script).config()
    assert made == CorrectionConfig(WeightConfig("sequence", "zero", 0.0, 2.0))
    assert trl.translate(CALL.format(value="CAP", more=""), [f"{trl.CLIP_MAX}=2.0"], script).config() == made


# ----------------------------------------------------------------------------------------------------- command line


def test_commands_print_a_file_that_check_passes(config_command: ConfigCommand):
    files = {
        "from-verl": {"algorithm": {"rollout_correction": TOKEN_IS | GEO}},
        "from-ms-swift": f"{MODE}: token_mask",
        "from-areal": "actor: {behav_imp_weight_cap: 5.0}",
        "from-trl": "use_vllm: true",
        "from-prime-rl": "[trainer.loss]",
    }
    for command, theirs in files.items():
        overrides = ["algorithm.rollout_correction.rollout_is=sequence"] if command == "from-verl" else []
        ours = config_command(theirs, *overrides, command=command).out
        assert "needs:" in config_command(ours).out


@pytest.mark.parametrize(
    ("command", "text", "words", "said"),
    [
        ("from-prime-rl", "[trainer.loss]", ["--trainer.loss.kl-tau=0.5"], "kl_tau: 0.5"),
        ("from-prime-rl", "[trainer.loss]", ["--trainer.loss.kl-tau", "0.5"], "kl_tau: 0.5"),
        ("from-trl", "use_vllm: true", [f"--no_{trl.CORRECTION}"], "corrects nothing in TRL"),
        ("from-trl", "use_vllm: false", ["--use-vllm", f"--{trl.CLIP_MAX}", "4"], "upper: 4.0"),
        ("from-ms-swift", f"{MODE}: sequence_mask", ["--as-documented", f"--{THRESHOLD}=3"], "upper: 3.0"),
        ("from-verl", f"python3 -m verl {IS}", ["--line", "1", f"{PREFIX}rollout_is_threshold=3"], "upper: 3.0"),
    ],
)
def test_settings_beside_a_file_may_have_dashes_and_follow_an_option(
    command: str, text: str, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tmp_path / "theirs").write_text(text)
    for given in ([str(tmp_path / "theirs"), *words], [*words, str(tmp_path / "theirs")]):
        assert main(["config", command, *given]) == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config-name=mine"], "override 'config-name=mine': expected algorithm.rollout_correction.KEY"),
        (["--lien", "3"], "override 'lien=3': .*; the command's own option is --line N"),
        (["--version"], "override 'version=true': .*; the command's own option is --line N"),
    ],
)
def test_a_word_with_dashes_that_is_not_read_is_refused_by_name(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tmp_path / "a.yaml").write_text("rollout_is: token")
    for given in (["decoupled_token_is()", *words], [*words, str(tmp_path / "a.yaml")]):
        assert main(["config", "from-verl", *given]) == 2
        assert re.search(said, capsys.readouterr().err)


def test_the_usage_asks_for_no_setting(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        main(["config", "from-trl"])
    assert "are required: FILE\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", TRANSLATORS)
def test_commands_refuse(command: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: {path: x}")
    packed = tmp_path / "packed.yaml.gz"
    packed.write_bytes(gzip.compress(b"rollout_is: token"))
    for target in (broken, packed, tmp_path / "missing.yaml"):
        assert main(["config", command, str(target)]) == 2
        assert str(target) in capsys.readouterr().err


@pytest.mark.parametrize("command", ["from-verl", "from-ms-swift", "from-areal"])
def test_a_python_file_is_told_from_a_script(command: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "train.py").write_text(f"args = {{'{MODE}': 'token_mask'}}")
    assert main(["config", command, str(tmp_path / "train.py")]) == 2
    assert "a Python file, which is not read for" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "show"])
@pytest.mark.parametrize(
    ("translator", "theirs"),
    [
        ("from-verl", {"algorithm": {"rollout_correction": TOKEN_IS}}),
        ("from-trl", {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}),
    ],
)
def test_a_file_of_another_framework_is_told_from_an_empty_one(
    translator: str, theirs: dict, command: str, config_command: ConfigCommand
):
    told = config_command(theirs, command=command, code=2).err
    assert re.search(f"neither the key `mis:` nor .*`config {translator}`", told)


# ------------------------------------------------------------------------------------------------------------ AReaL

CAPPED = {"behav_imp_weight_cap": 5.0, "behav_imp_weight_floor": 0.2, "use_decoupled_loss": True}


@pytest.mark.parametrize(
    "override", ["actor.rejection_sampling={upper: 3.0}", "actor={rejection_sampling:{upper:3.0}}"]
)
def test_areal_a_mapping_is_merged_as_hydra_does(override: str):
    block = {"actor": {"use_decoupled_loss": True, "rejection_sampling": {"action": "clamp", "lower": 0.2}}}
    script = f"cat > a.yaml <<EOF\n{yaml.safe_dump(block)}EOF\npython3 x.py --config a.yaml '{override}'"
    for made in (areal.translate(yaml.safe_dump(block), [override]), areal.translate(script)):
        assert made.config() == CorrectionConfig(WeightConfig("token", "clip", 0.2, 3.0))


def test_areals_own_words_stand_beside_each_setting():
    tree = {
        "rollout": {"max_concurrent_rollouts": 256, "max_head_offpolicyness": 2, "enable_segment_wise_ppo": True},
        "actor": CAPPED | {"prox_logp_method": "loglinear", "importance_sampling_level": "token"},
        "teacher": {"distill_loss_weight": 0.1},
    }
    text = areal.translate(yaml.safe_dump(tree)).text()
    flat = " ".join(line.lstrip("# ") for line in text.splitlines())
    for said in (
        "needs: --loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss",
        "--custom-config-path FILE, where FILE holds this text",
        "upper: 5.0 # actor.behav_imp_weight_cap: 5.0",
        "lower: 0.2 # actor.behav_imp_weight_floor: 0.2",
        "# rollout.enable_segment_wise_ppo: true",
        "--max-head-offpolicyness 2 with --async",
        "rollout.max_concurrent_rollouts: 256 counts prompts in AReaL",
        "actor.prox_logp_method: loglinear: pi_old is always recomputed here",
        "teacher: AReaL adds a teacher's loss",
    ):
        assert said in re.sub(r" +", " ", flat)
    assert "importance_sampling_level" not in text and "use_decoupled_loss is not in the file" not in text
    assert "use_decoupled_loss is not in the file" in areal.translate("behav_imp_weight_cap: 5").text()
    (_, said) = areal.translate("actor: {use_decoupled_loss: true}").notes
    assert said.startswith("actor.use_decoupled_loss: AReaL 1.0.4 weighs nothing without rejection_sampling")


def test_areals_own_file_is_refused_by_the_check_which_names_the_translator(config_command: ConfigCommand):
    told = config_command({"seed": 1, "actor": CAPPED | {"path": "x"}}, code=2).err
    assert "actor.behav_imp_weight_cap, actor.behav_imp_weight_floor" in told and "config from-areal" in told


def test_a_command_that_is_gone_names_what_takes_its_place(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        main(["config", "from-miles", "mis.yaml"])
    error = capsys.readouterr().err
    assert "pass it as --custom-config-path FILE" in error and "`config check FILE`" in error


VERL_LOSS = "actor_rollout_ref.actor.policy_loss"


@pytest.mark.parametrize(
    ("behind", "message"),
    [
        (["actor_rollout_ref.actor=5"], "got 5; expected a mapping"),
        ([f"{VERL_LOSS}={{loss_mode:sapo}}", f"{VERL_LOSS}={{}}"], "stands beside a value for all of"),
        ([f"{VERL_LOSS}.loss_mode=geo_mean", f"{VERL_LOSS}={{loss_mode:sapo}}"], "stands beside a value for all of"),
    ],
)
def test_a_mapping_behind_the_file_is_no_other_value_and_stands_alone(behind: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        verl.translate("algorithm: {rollout_correction: {rollout_is: token}}", behind)


def test_a_misspelled_command_names_the_commands_that_there_are(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        main(["config", "chek", "mis.yaml"])
    offered = re.findall(r"[\w-]+", capsys.readouterr().err.rpartition("choose from")[2])
    assert offered == [*COMMANDS["config"]]
