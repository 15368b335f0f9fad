"""Configs of other frameworks, translated: what they mean here, what is said of the rest, what is refused."""

import gzip
import io
import re
import sys
from pathlib import Path
from typing import Literal

import pytest
import yaml
from documented import DEFAULTS, GEO, PG, PPO, TOKEN_IS, VERL

from mis_plugins.__main__ import TRANSLATORS, load, main
from mis_plugins.config.loading import preset_path
from mis_plugins.config.model import (
    CorrectionConfig,
    NormalizeConfig,
    ObjectiveConfig,
    OpsmConfig,
    RejectRule,
    SegmentWiseConfig,
    WeightConfig,
)
from mis_plugins.errors import ConfigError
from mis_plugins.explain.translate import areal, ms_swift, prime_rl, trl, verl
from mis_plugins.explain.translate.translation import Translation


def preset(name: str) -> CorrectionConfig:
    return load(preset_path(name))


def from_verl(keys: dict | list, *overrides: str) -> Translation:
    return verl.translate(yaml.safe_dump(keys), overrides)


def read_back(translation: Translation, folder: Path) -> CorrectionConfig:
    """As the host would, from the text that the command prints."""
    file = folder / "translated.yaml"
    file.write_text(translation.text())
    return load(file)


# ------------------------------------------------------------------------------------------------------- verl 0.9.1


@pytest.mark.parametrize("name", VERL)
def test_verl_presets_become_ours(name: str, tmp_path: Path):
    for keys in (VERL[name], DEFAULTS | VERL[name], {"algorithm": {"gamma": 1.0, "rollout_correction": VERL[name]}}):
        translation = from_verl(keys)
        assert translation.config() == preset(f"verl-{name.replace('_', '-')}")
        assert read_back(translation, tmp_path) == translation.config()


def ruled(over: str, lower: float | None, upper: float, statistic: str = "ratio") -> CorrectionConfig:
    denominator = "kept" if over == "token" else "original"
    return CorrectionConfig(None, (RejectRule(statistic, over, lower, upper),), denominator=denominator)  # type: ignore[arg-type]


def weighed(*arguments: object, **keys: object) -> CorrectionConfig:
    return CorrectionConfig(WeightConfig(*arguments, **keys))  # type: ignore[arg-type]


def rejecting(option: object, threshold: object) -> dict:
    return {"rollout_rs": option, "rollout_rs_threshold": threshold}


def whole(keys: dict, **others: dict) -> dict:
    return {"algorithm": {"rollout_correction": keys}, **others}


def dppo(mode: str | None = "dppo_tv", **actor: object) -> dict:
    return {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": mode}, **actor}}}


BATCH = {"rollout_is_batch_normalize": True}
PREFIX = "algorithm.rollout_correction."
WHOLE = {"algorithm": {"rollout_correction": {"_target_": "verl.RolloutCorrectionConfig", **DEFAULTS}}}
TWO = CorrectionConfig(
    None, (RejectRule("k3", "token", upper=0.5), RejectRule("k3", "mean", upper=0.01)), denominator="kept"
)
MEANT = [
    (rejecting("token_k1", "0.6_1.4"), (), ruled("token", 1 / 1.4, 1 / 0.6)),
    (rejecting("seq_mean_k1", 1.25), (), ruled("mean", 1 / 1.25, 1.25)),
    (rejecting("seq_sum_k1", "0.5_4"), (), ruled("sum", 0.25, 2.0)),
    (rejecting("token_k2", "0.3"), (), ruled("token", None, 0.3, "k2")),
    (rejecting("seq_max_k2", 0.3), (), ruled("max", None, 0.3, "k2")),
    (rejecting("seq_max_k3", 0.3), (), ruled("max", None, 0.3, "k3")),
    (rejecting("seq_sum_k3", 0.3), (), ruled("sum", None, 0.3, "k3")),
    (rejecting("seq_mean_k2", 0.3), (), ruled("mean", None, 0.3, "k2")),
    (rejecting("token_k3, seq_mean_k3", "0.5,0.01"), (), TWO),
    (rejecting("token_k3,token_k3,seq_mean_k3", "0.5,0.01"), (), TWO),
    ({"rollout_is": "sequence", "rollout_is_threshold": "0.5_5"}, (), weighed("sequence", "zero", 0.5, 5.0)),
    ({"rollout_is": "token", "rollout_is_threshold": None}, (), CorrectionConfig()),
    # the whole batch on one process; in bypass each micro-batch over all ranks; zeros count in both
    (TOKEN_IS | BATCH, (), weighed(upper=2.0, normalize=NormalizeConfig("rollout", "valid"))),
    (TOKEN_IS | PG | BATCH, (), CorrectionConfig(
        WeightConfig(upper=2.0, normalize=NormalizeConfig("data_parallel", "valid")),
        objective=ObjectiveConfig("reinforce", "behavior"))),
    (TOKEN_IS | PPO | BATCH, (), preset("verl-bypass-ppo-clip")),
    (WHOLE, (f"{PREFIX}rollout_is=token", f"+{PREFIX}rollout_is_threshold=0.5_5.0"),
     preset("verl-decoupled-token-icepop")),
    (WHOLE, (f"{PREFIX}rollout_is=null",), CorrectionConfig()),
    *((dppo(mode, clip_ratio_low=0.1) | {"algorithm": {"rollout_correction": TOKEN_IS}}, (), weighed(upper=2.0))
      for mode in ("vanilla", "gspo", None)),
    # whose loss takes none of the weights that the trainer hands it
    (dppo("bypass_mode") | {"algorithm": {"rollout_correction": TOKEN_IS | GEO}}, (), CorrectionConfig(
        None, preset("verl-decoupled-geo-rs").reject)),
    ({"rollout_is": "token", "rollout_is_threshold": "${trainer.cap}"}, (f"{PREFIX}rollout_is_threshold=4",),
     weighed(upper=4.0)),
    (TOKEN_IS | PG, (f"{PREFIX}bypass_mode=FALSE",), weighed(upper=2.0)),
    *((TOKEN_IS, (override,), weighed(upper=3.0))
      for override in ("algorithm.rollout_correction={rollout_is_threshold: 3.0}",
                       "algorithm={rollout_correction:{rollout_is_threshold:3.0}}")),
    (TOKEN_IS | {"hydra": {"run": {"dir": "x"}}}, (), weighed(upper=2.0)),
    *((dppo("dppo_tv") | {"algorithm": {"rollout_correction": rejecting("seq_mean_k3", 0.01) | PPO}} | trainer, (),
       CorrectionConfig(None, (RejectRule("k3", "mean", upper=0.01),), objective=ObjectiveConfig("clip", "behavior")))
      for trainer in ({"trainer": {"use_v1": False}}, {"trainer": {"use_v1": None}}, {"async_training": {}})),
    # as verl prints the config of a run
    *((whole(TOKEN_IS, actor={"policy_loss": {"loss_mode": "vanilla", "rollout_correction": block}}), (),
       weighed(upper=2.0)) for block in (None, {"rollout_is": None, "bypass_mode": False})),
    ({"defaults": ["fully_async_ppo_trainer", "_self_"], "algorithm": {"rollout_correction": TOKEN_IS}}, (),
     CorrectionConfig(objective=ObjectiveConfig("clip", "behavior"))),
    # 010 is 8 to YAML; to Hydra it is text, of which verl makes 10
    *((TOKEN_IS, (f"rollout_is_threshold={text}",), weighed(upper=upper))
      for text, upper in (("2", 2), ("2.5", 2.5), ("+.5", 0.5), ("1.0E+1", 10), ("1e1", 10), ("010", 10))),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "overrides", "meant"), MEANT)
def test_verl_settings_mean(keys: dict, overrides: tuple[str, ...], meant: CorrectionConfig):
    assert from_verl(keys, *overrides).config() == meant


def test_verl_each_rule_stands_beside_its_own_words():
    both = {"rollout_rs": "token_k3,seq_mean_k1", "rollout_rs_threshold": "0.5,0.5_4"}
    rules = [line for line in from_verl(both).text().splitlines() if line.lstrip().startswith("- ")]
    assert [line.partition("# ")[2] for line in rules] == [
        "rollout_rs: token_k3, rollout_rs_threshold: 0.5",
        "rollout_rs: seq_mean_k1, rollout_rs_threshold: 0.5_4",
    ]


def losing(mode: str) -> dict:
    return {"actor": {"policy_loss": {"loss_mode": mode}}, "algorithm": {"rollout_correction": TOKEN_IS}}


UNSCORED = {"rollout": {"calculate_log_probs": False}}
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode="
AGGREGATED = "actor_rollout_ref.actor.loss_agg_mode="
NOTES = [
    ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_4"}, (),
     "seq_sum_k1: verl bounds k1 = -log r, so 0.5_4 keeps ratios in [1/upper, 1/lower]", ""),
    (TOKEN_IS | BATCH, (), "use scope: data_parallel there", ""),
    (TOKEN_IS | PG | BATCH, (), "each micro-batch over all ranks", "use scope: data_parallel there"),
    (TOKEN_IS | PPO, (), "does not apply them", ""),
    (TOKEN_IS | {"loss_type": "reinforce"}, (), "loss_type: reinforce has no effect without bypass_mode", ""),
    (TOKEN_IS | PG, (), "", "no effect"),
    (DEFAULTS, (), "corrects nothing", ""),
    (whole(TOKEN_IS, actor_rollout_ref=UNSCORED), (), "calculate_log_probs: false", ""),
    (TOKEN_IS, ("actor_rollout_ref.rollout.calculate_log_probs=false",), "calculate_log_probs: false", ""),
    (TOKEN_IS, (), "loss_agg_mode: token-mean, verl's default, averages over all tokens", "calculate_log_probs"),
    (TOKEN_IS, (f"{AGGREGATED}token-mean",), "--calculate-per-token-loss; the flag refuses denominator: kept", ""),
    (TOKEN_IS, (f"{AGGREGATED}seq-mean-token-mean",), "as the hosts do without --calculate-per-token-loss", ""),
    (TOKEN_IS, (f"{AGGREGATED}seq-mean-token-sum",), "seq-mean-token-sum is no host's way", ""),
    # `apply_bypass_mode`, which hands the settings to the loss, is called by the trainer before 0.9.0 alone
    (whole(GEO | PPO), (), "applies no more of this", ""),
    (TOKEN_IS | PG, (), "applies no more of this", ""),
    (TOKEN_IS | PG, ("trainer.use_v1=true",), "applies no more of this", ""),
    (TOKEN_IS | PG, ("trainer.use_v1=false",), "", "applies no more of this"),
    (whole(GEO | PPO, trainer={"use_v1": False}), (), "", "applies no more of this"),
    (TOKEN_IS | PPO, (), "", "applies no more of this"),
    (losing("gspo"), (), "gspo is not translated; mis.objective.ratio: sequence gives GSPO's ratio.", ""),
    (losing("cispo"), (), "cispo is not translated; mis.objective.surrogate: cispo gives CISPO's loss.", ""),
    (losing("clip_cov"), (), "policy_loss.loss_mode: clip_cov is not translated.", ""),
    *((whole(TOKEN_IS, distillation={"enabled": on, "distillation_loss": {"loss_mode": "k1"}}), (), said, unsaid)
      for on, said, unsaid in ((True, "distillation.enabled: true adds", ""), (False, "", "distillation"))),
    (losing("vanilla"), (), "pass --eps-clip 0.2 --eps-clip-high 0.2 --eps-clip-c 3, PPO's clip.", ""),
    (dppo("vanilla", clip_ratio_high=0.28) | {"algorithm": {"rollout_correction": TOKEN_IS | PPO}},
     ("actor_rollout_ref.actor.clip_ratio_c=10",), "--eps-clip 0.2 --eps-clip-high 0.28 --eps-clip-c 10,", ""),
    (dppo("vanilla", clip_ratio_low="${low}") | {"algorithm": {"rollout_correction": TOKEN_IS}}, (),
     "clip_ratio_low: ${low} is for the launch to decide; put actor_rollout_ref.actor.clip_ratio_low=V", "pass --eps"),
    *((dppo("geo_mean", clip_ratio_c=none), (), "pass --eps-clip 0.2", "") for none in (None, 3)),
    *((losing(mode), (), "", "pass --eps-clip") for mode in ("gspo", "cispo", "gpg", "${MODE}")),
    *((whole(TOKEN_IS, actor={"use_kl_loss": True} | keys), (), f"pass --use-kl-loss --kl-loss-coef {told}.", "")
      for keys, told in (({}, "0.001 --kl-loss-type low_var_kl"), ({"kl_loss_type": "kl"}, "0.001 --kl-loss-type k1"),
                         ({"kl_loss_coef": 0.1, "kl_loss_type": "k3+"}, "0.1; no host has kl_loss_type: k3+"))),
    *((whole(TOKEN_IS, actor={"use_kl_loss": uses, "kl_loss_coef": scale}), (), "", "use_kl_loss")
      for uses, scale in ((False, 0.1), (True, 0.0))),
    (TOKEN_IS, ("actor_rollout_ref.actor.entropy_coeff=0.01",), "coeff: 0.01 of an entropy bonus is --entropy", ""),
    (whole(TOKEN_IS, actor={"entropy_coeff": 0}), (), "", "entropy"),
    ({"algorithm": {"rollout_correction": TOKEN_IS, "use_kl_in_reward": True}}, (), "is --kl-coef of the hosts", ""),
    (TOKEN_IS | PG, (), "", "pass --eps-clip"),
    (losing("bypass_mode"), (), "verl's loss is PPO's clip against pi_old and applies none of these weights", ""),
    (losing("${MODE}"), (), "where it is dppo_tv or dppo_kl or sapo or geo_mean", ""),
    (losing("clip_cov"), (f"{LOSS}vanilla",), "", "loss_mode"),
    (losing("gspo"), (f"{PREFIX}bypass_mode=true", "trainer.use_v1=false"), "gspo never acts in verl", "translated"),
    *(({"algorithm": {"rollout_correction": TOKEN_IS, "adv_estimator": name}}, (), said, unsaid)
      for name, said, unsaid in (("grpo", "", "adv_estimator"),
                                 ("optimal_token_baseline", "reads the sum of squared probabilities", ""))),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "overrides", "said", "unsaid"), NOTES)
def test_verl_notes(keys: dict, overrides: tuple[str, ...], said: str, unsaid: str):
    told = " ".join(from_verl(keys, *overrides).notes)
    assert said in told and (not unsaid or unsaid not in told)


FULLY_ASYNC = "python3 -m verl.experimental.fully_async_policy.fully_async_main trainer.nnodes=1"
ONE_STEP = "python3 verl/experimental/one_step_off_policy/main_ppo.py"
IS, RS = f"{PREFIX}rollout_is=token", f"{PREFIX}rollout_rs=seq_mean_k3 {PREFIX}rollout_rs_threshold=0.01"
CLIPS_AGAINST_MU = CorrectionConfig(objective=ObjectiveConfig("clip", "behavior"))
REJECTS_IN_BYPASS = CorrectionConfig(
    None, (RejectRule("k3", "mean", upper=0.01),), objective=ObjectiveConfig("clip", "behavior")
)
COPY = f"'+actor_rollout_ref.actor.policy_loss.rollout_correction=${{{PREFIX[:-1]}}}'"
COMMANDS = [
    (FULLY_ASYNC, CLIPS_AGAINST_MU),
    (f"{FULLY_ASYNC} {IS}", CLIPS_AGAINST_MU),
    (f"{FULLY_ASYNC} --config-path=config --config-name=fully_async_ppo_megatron_trainer.yaml {IS}", CLIPS_AGAINST_MU),
    (f"{ONE_STEP} --config-name one_step_off_ppo_trainer {IS} --config-path config", CLIPS_AGAINST_MU),
    (f"{FULLY_ASYNC} {PREFIX[:-1]}={{rollout_is:token}}", CLIPS_AGAINST_MU),
    (f"{FULLY_ASYNC} {IS} {PREFIX}loss_type=reinforce", CorrectionConfig(
        WeightConfig(upper=2.0), objective=ObjectiveConfig("reinforce", "behavior"))),
    (f"{ONE_STEP} {IS} {PREFIX}bypass_mode=False", weighed(upper=2.0)),
    (f"{FULLY_ASYNC} {RS} {LOSS}dppo_tv", REJECTS_IN_BYPASS),
    (f"python3 -m verl.trainer.main_ppo trainer.project_name=one_step_off_policy {IS}", weighed(upper=2.0)),
    (f"python3 -m verl.trainer.main_ppo {PREFIX}bypass_mode=True {RS} {LOSS}bypass_mode {COPY}", REJECTS_IN_BYPASS),
    (f"python3 -m verl.trainer.main_ppo {PREFIX}rollout_is=sequence {IS}", weighed(upper=2.0)),
    (f"srun wrap.sh python3 -m verl.trainer.main_ppo {IS}", weighed(upper=2.0)),
    (f"bash setup.sh\npython3 -m verl.trainer.main_ppo {IS}", weighed(upper=2.0)),
    (f"python3 -m verl.trainer.main_ppo {IS} distillation.distillation_loss.loss_mode=k1", weighed(upper=2.0)),
]  # fmt: skip


@pytest.mark.parametrize(("command", "meant"), COMMANDS)
def test_verl_commands_mean(command: str, meant: CorrectionConfig):
    """Also of the async trainers, which have bypass_mode by default and apply there what the V1 trainer drops."""
    made = verl.translate(command)
    assert made.config() == meant
    assert verl.V1_TRAINER not in made.notes and (verl.ASYNC_TRAINER in made.notes) == ("verl.trainer" not in command)


@pytest.mark.parametrize("mode", verl.BY_DIVERGENCE)
def test_verl_dppo(mode: Literal["dppo_tv", "dppo_kl"], tmp_path: Path):
    """Against pi_old, times the weights of the correction; in bypass against mu, without weights and rules."""
    for keys in (dppo(mode), {"loss_mode": mode}):
        alone = from_verl(keys)
        assert alone.config() == CorrectionConfig(objective=ObjectiveConfig(mode, "proximal"))
        assert verl.MU_BY_BYPASS in alone.notes
    weighed = from_verl(dppo(mode) | {"algorithm": {"rollout_correction": TOKEN_IS}})
    assert weighed.config() == CorrectionConfig(WeightConfig(upper=2.0), objective=ObjectiveConfig(mode))
    bypass = from_verl(dppo(mode) | {"algorithm": {"rollout_correction": TOKEN_IS | GEO | {"bypass_mode": True}}})
    assert bypass.config() == preset(mode.replace("_", "-"))
    assert verl.MODE_IN_BYPASS.format(mode=mode) in bypass.notes
    assert {"rollout_is: dropped, as verl does there.", "rollout_rs: dropped, as verl does there."} <= set(bypass.notes)
    assert f"surrogate: {mode}  # loss_mode: {mode}" in bypass.text()
    assert read_back(bypass, tmp_path) == bypass.config()


@pytest.mark.parametrize(
    ("widths", "flags"),
    [
        ({}, "--eps-clip 0.2 --eps-clip-high 0.2 --eps-clip-c 3,"),
        ({"clip_ratio": 0.5}, "--eps-clip 0.2 --eps-clip-high 0.2 --eps-clip-c 3,"),
        ({"clip_ratio": 0.5, "clip_ratio_low": None}, "--eps-clip 0.5 --eps-clip-high 0.2 --eps-clip-c 3,"),
        (
            {"clip_ratio_low": 0.15, "clip_ratio_high": 0.1, "clip_ratio_c": 20},
            "--eps-clip 0.15 --eps-clip-high 0.1 --eps-clip-c 20,",
        ),
    ],
)
def test_verl_dppo_widths_are_flags(widths: dict, flags: str):
    """verl's actor sets low and high itself, so that `clip_ratio` alone does nothing."""
    told = " ".join(from_verl(dppo(**widths)).notes)
    assert flags in told
    assert ("clip_ratio: 0.5 has no effect" in told) == (widths == {"clip_ratio": 0.5})


@pytest.mark.parametrize("bypass", [False, True])
def test_verl_sapo_and_gmpo(bypass: bool, tmp_path: Path):
    """SAPO's temperatures are settings, GMPO's widths are flags; both average each response, whatever verl is told."""
    section = {"algorithm": {"rollout_correction": TOKEN_IS | {"bypass_mode": bypass}}}
    old = "behavior" if bypass else "proximal"
    weight = None if bypass else WeightConfig(upper=2.0)
    sapo = from_verl(dppo("sapo", tau_neg=2.0, clip_ratio_low=0.1, loss_agg_mode="token-mean") | section)
    assert sapo.config() == CorrectionConfig(weight, objective=ObjectiveConfig("sapo", old, tau_neg=2.0))
    gmpo = from_verl(dppo("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.3, tau_pos=3.0) | section)
    assert gmpo.config() == CorrectionConfig(weight, objective=ObjectiveConfig("gmpo", old))
    for made in (sapo, gmpo):
        notes = " ".join(made.notes)
        assert read_back(made, tmp_path) == made.config()
        assert "averages each response and then all" in notes and "over all tokens" not in notes
        assert ("hands" in notes) == bypass and verl.MU_BY_BYPASS not in made.notes
        assert ("--eps-clip 0.4 --eps-clip-high 0.3" in notes) == (made is gmpo) == ("--eps-clip" in notes)
    assert "tau_neg: 2.0" in sapo.text()
    assert (verl.GEOMETRIC_WEIGHTS in gmpo.notes) != bypass


@pytest.mark.parametrize(("mode", "key"), [("sapo", "clip_ratio_low"), ("dppo_tv", "tau_pos"), ("geo_mean", "tau_neg")])
def test_verl_a_key_that_the_loss_does_not_read_is_refused(mode: str, key: str):
    with pytest.raises(ConfigError, match=rf"{key}: read with policy_loss\.loss_mode: .* alone"):
        from_verl(dppo(mode), f"actor_rollout_ref.actor.{key}=0.5")


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


# ---------------------------------------------------------------------------------------------------- verl, refused


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        ("RolloutCorrectionConfig()", weighed("sequence", "truncate", upper=2.0)),
        ("verl.trainer.config.RolloutCorrectionConfig('token', rollout_is_threshold=3)", weighed(upper=3.0)),
        ("RolloutCorrectionConfig(rollout_is=None, rollout_rs='seq_mean_k1', rollout_rs_threshold=1.25)",
         ruled("mean", 1 / 1.25, 1.25)),
    ],
)  # fmt: skip
def test_verl_the_class_of_the_presets_has_defaults_of_its_own(call: str, meant: CorrectionConfig):
    assert verl.translate(call).config() == meant


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


THRESHOLDED = f"\npython3 -m verl {PREFIX}rollout_is=token {PREFIX}rollout_is_threshold="


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


@pytest.mark.parametrize("name", VERL)
@pytest.mark.parametrize("form", ["{}", "{}()", "RolloutCorrectionConfig.{}()", "rollout_correction: {}()"])
def test_verl_presets_by_name(name: str, form: str):
    assert verl.translate(form.format(name)).config() == preset(f"verl-{name.replace('_', '-')}")


# --------------------------------------------------------------------------------------------------------- ms-swift

MODE, THRESHOLD = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"
DELTA = "off_policy_sequence_mask_delta"


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("form", ["yaml", "dashes", "script", "script with ="])
def test_ms_swift_modes(mode: str, form: str, tmp_path: Path):
    text = {
        "yaml": f"{MODE}: {mode}",
        "dashes": f"--{MODE}: {mode}\n--log_rollout_offpolicy_metrics: true",
        "script": f"swift rlhf --rlhf_type grpo \\\n    --{MODE} {mode} \\\n    --{THRESHOLD} 2.0\n",
        "script with =": f"swift rlhf --rlhf_type grpo --{MODE}={mode} --beta=0.04",
    }[form]
    translation = ms_swift.translate(text)
    assert translation.config() == preset(f"ms-swift-{mode.replace('_', '-')}")
    assert read_back(translation, tmp_path) == translation.config()


def test_ms_swift_flags_with_dashes_and_comments():
    """Its parser takes either; what a script has commented out is not said."""
    text = f"# --{THRESHOLD} 5\nswift rlhf --{MODE.replace('_', '-')} token_mask \\\n --{THRESHOLD.replace('_', '-')}=3"
    weight = ms_swift.translate(text + f" # --{THRESHOLD} 7").config().weight
    assert weight == WeightConfig("token", "zero", 0.0, 3.0)
    assert ms_swift.translate(f"{MODE.replace('_', '-')}: token_truncate").config().weight == WeightConfig()


@pytest.mark.parametrize(
    "script",
    [
        f"CUDA_VISIBLE_DEVICES=0 swift rlhf --{MODE} token_mask --{THRESHOLD} 3",
        f"swift rlhf --{MODE} \\\n  token_mask \\\n  --{THRESHOLD} \\\r\n  3",
        f"swift rlhf --{MODE} token_mask --{THRESHOLD} 2 --{THRESHOLD}=3",
        f"ARGS=(\n  --{MODE} 'token_mask'\n  --{THRESHOLD} \"3\"\n)\nswift rlhf ${{ARGS[@]}}",
        f"echo it''s\nswift rlhf --model a#b --{MODE} token_mask --{THRESHOLD} 03",
    ],
)
def test_ms_swift_scripts_are_read_as_a_shell_reads_them(script: str):
    assert ms_swift.translate(script).config().weight == WeightConfig("token", "zero", 0.0, 3.0)


WITH_MASK = f"{DELTA}: 0.1\nbeta: 0.04"


OPSM = OpsmConfig(0.1, "sequence", "behavior")
METRICS = "swift rlhf --log_rollout_offpolicy_metrics"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (f"{MODE}: sequence_mask\n{THRESHOLD}: 1.5",
         CorrectionConfig(WeightConfig(bound="none"), (RejectRule(over="mean", upper=1.5),))),
        ("log_rollout_offpolicy_metrics: true", CorrectionConfig()),
        (f"{MODE}: null", CorrectionConfig(metrics="none")),
        # its mask, like its weight, hits the KL term
        (f"{DELTA}: 0.1", CorrectionConfig(opsm=OPSM)),
        (f"{DELTA}: 0.1\nbeta: 0", CorrectionConfig(opsm=OPSM)),
        (f"{WITH_MASK}\nkl_in_reward: true", CorrectionConfig(opsm=OPSM)),
        (f"{MODE}: token_truncate\n{WITH_MASK}",
         CorrectionConfig(WeightConfig(), opsm=OPSM, objective=ObjectiveConfig(weigh_kl=True))),
        ("loss_type: sapo", preset("sapo")),
        (f"{MODE}: token_truncate\nloss_type: cispo",
         CorrectionConfig(WeightConfig(), objective=ObjectiveConfig("cispo"))),
        ("swift rlhf --loss_type cispo --importance_sampling_level sequence",
         CorrectionConfig(objective=ObjectiveConfig("cispo", ratio="sequence"))),
        ("swift rlhf --loss_type sapo --tau_neg 2 --importance_sampling_level sequence",
         CorrectionConfig(objective=ObjectiveConfig("sapo", ratio="sequence", tau_neg=2.0))),
        (f"{MODE}: token_truncate\nloss_type: sapo\ntau_pos: 0.5",
         CorrectionConfig(WeightConfig(), objective=ObjectiveConfig("sapo", tau_pos=0.5))),
        (f"{WITH_MASK}\nloss_type: sapo",
         CorrectionConfig(opsm=OPSM, objective=ObjectiveConfig("sapo", weigh_kl=True))),
        (f"{MODE}: token_truncate\nloss_type: grpo\ntau_pos: 0.5", CorrectionConfig(WeightConfig())),
        (f"swift rollout --use_vllm true --model q\nswift rlhf --run_name swift --{MODE} token_truncate",
         CorrectionConfig(WeightConfig())),
        (f"docker exec swift swift rlhf --{MODE} token_truncate", CorrectionConfig(WeightConfig())),
        (f"swift rlhf --rlhf_type $TYPE --{MODE} token_truncate", CorrectionConfig(WeightConfig())),
        ("loss_type: [sapo]", CorrectionConfig(objective=ObjectiveConfig("sapo"))),
        (f"{MODE}: token_truncate\nloss_type:\n- real", CorrectionConfig(metrics="none")),
        (f"swift rlhf --use_vllm false --{MODE} token_truncate", CorrectionConfig(metrics="none")),
        (f"use_vllm: false\n{DELTA}: 0.1", CorrectionConfig(opsm=OpsmConfig(0.1, "sequence", "proximal"))),
        (f"{MODE}: token_truncate\nloss_type: real", CorrectionConfig(metrics="none")),
        (f"cat > a.yaml <<EOF\n{MODE}: token_truncate\n{THRESHOLD}: 2\nEOF\nswift rlhf a.yaml --{THRESHOLD} 3",
         CorrectionConfig(WeightConfig(upper=3.0))),
        *((f"{METRICS}{said}", CorrectionConfig()) for said in ("", " yes")),
        *((f"{METRICS}{said}", CorrectionConfig(metrics="none")) for said in (" 'false'", "=F")),
    ],
)  # fmt: skip
def test_ms_swift_settings_mean(text: str, meant: CorrectionConfig):
    assert ms_swift.translate(text).config() == meant


@pytest.mark.parametrize(
    ("text", "said", "unsaid"),
    [
        (f"{MODE}: token_truncate\nkl_in_reward: true", "", "KL term"),
        (f"{WITH_MASK}\nkl_in_reward: true", "", "KL term"),
        (f"{MODE}: token_truncate\nadvantage_estimator: rloo", "", "KL term"),  # the KL goes into its reward
        (f"{MODE}: token_truncate\nadvantage_estimator: rloo\nkl_in_reward: false", "KL term", ""),
        (f"{DELTA}: 0.1", "KL term", ""),  # beta is 0.04 unless it is given
        (f"{MODE}: token_truncate\nbeta: null", "KL term", ""),
        (f"{MODE}: token_truncate\nbeta: 0", "", "KL term"),
        (WITH_MASK, "", "KL term"),  # objective.weigh_kl serves it
        (f"{WITH_MASK}\nloss_type: fipo", "loss_type: fipo is another policy loss", ""),
        ("loss_type: cispo", "CISPO then cuts every ratio at epsilon, 0.2;", "corrects nothing"),
        (f"{WITH_MASK}\nimportance_sampling_level: sequence", "importance_sampling_level: sequence is another", ""),
        (f"{WITH_MASK}\nloss_type: dr_grpo", "", "another policy loss"),
        (f"{DELTA}: 0.1\nbeta: 0\nloss_type: fipo", "", "another policy loss"),
        (f"{MODE}: token_truncate\nloss_type: dapo", "over all tokens, as the hosts do with --calculate-per-token", ""),
        (f"{MODE}: token_truncate\nloss_type: dr_grpo", "dr_grpo has no flag in the hosts; their loss stays.", ""),
        (f"{MODE}: token_truncate\nimportance_sampling_level: sequence", "is --advantage-estimator gspo of", ""),
        (f"{MODE}: sequence_mask", "raw token ratios", DELTA),
        (f"{MODE}: token_mask", "", "raw token ratios"),
        (f"{MODE}: token_mask", "", "corrects nothing"),
        (f"{MODE}: null", "ms-swift corrects nothing with these arguments.", ""),
        (f"{MODE}: token_mask\nuse_vllm: false", "token_mask does nothing in ms-swift with use_vllm: false", "KL term"),
        (f"{MODE}: token_mask\nloss_type: real", "token_mask does nothing in ms-swift with loss_type: real", "KL term"),
        (f"{MODE}: token_mask", "here it is read as true, the default of `megatron rlhf`.", ""),
        (f"{MODE}: token_mask\nuse_vllm: true", "", "use_vllm is not in it"),
        (f"{MODE}: token_mask\nkl_in_reward: true\nscale_rewards: gdpo", "KL term", ""),
        (f"{MODE}: token_mask\nloss_type: null", "", "has no flag"),
        (f"{MODE}: token_mask\nloss_type: cispo\nepsilon_high: 5", "pass --eps-clip 1 --eps-clip-high 4.", "high is"),
        (f"{MODE}: token_mask\nepsilon_high: 0.28", "epsilon_high: pass --eps-clip 0.2 --eps-clip-high 0.28.", ""),
        (f"swift rlhf --{MODE} token_mask --delta $D", "delta: $D is for the launch to decide", "eps-clip"),
        (f"{MODE}: token_mask\noverlong_filter: true", "overlong_filter: true drops truncated responses", ""),
        (f"{DELTA}: 0.1\ntop_entropy_quantile: 0.2", "top_entropy_quantile: 0.2 keeps tokens of high entropy", ""),
        (f"{MODE}: token_mask\nadvantage_reweight: rlsd\nsdar_loss_coef: 0.1", "advantage_reweight: rlsd weighs", ""),
        (f"swift rlhf --{MODE} token_mask --teacher_model Q/T", "teacher_model: Q/T changes the advantages", ""),
        (f"{MODE}: token_mask\nadvantage_reweight: null\nsdar_loss_coef: 0\noverlong_filter: no", "", "nothing here"),
    ],
)  # fmt: skip
def test_ms_swift_notes(text: str, said: str, unsaid: str):
    told = " ".join(ms_swift.translate(text).notes)
    assert said in told and (not unsaid or unsaid not in told)


def test_ms_swift_by_its_document(tmp_path: Path, capsys: pytest.CaptureFixture):
    """`sequence_mask` weighs a kept sequence by its geometric mean; of another mode the flag has no effect."""
    (tmp_path / "a.yaml").write_text(f"{MODE}: sequence_mask")
    assert main(["config", "from-ms-swift", str(tmp_path / "a.yaml"), "--as-documented"]) == 0
    (tmp_path / "ours.yaml").write_text(capsys.readouterr().out)
    assert load(tmp_path / "ours.yaml") == preset("ms-swift-sequence-mask-as-documented")
    with pytest.raises(ConfigError, match="^--as-documented has no effect without .*: sequence_mask"):
        ms_swift.translate(f"{MODE}: token_mask", as_documented=True)


# ----------------------------------------------------------------------------------------------------- command line


def test_commands_print_a_file_that_check_passes(tmp_path: Path, capsys: pytest.CaptureFixture):
    files = {
        "from-verl": yaml.safe_dump({"algorithm": {"rollout_correction": TOKEN_IS | GEO}}),
        "from-ms-swift": f"{MODE}: token_mask",
        "from-areal": "actor: {behav_imp_weight_cap: 5.0}",
        "from-trl": "use_vllm: true",
        "from-prime-rl": "[trainer.loss]",
    }
    for command, text in files.items():
        theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
        theirs.write_text(text)
        overrides = ["algorithm.rollout_correction.rollout_is=sequence"] if command == "from-verl" else []
        assert main(["config", command, str(theirs), *overrides]) == 0
        ours.write_text(capsys.readouterr().out)
        assert main(["config", "check", str(ours)]) == 0
        assert "needs:" in capsys.readouterr().out


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
def test_a_file_of_another_framework_is_told_from_an_empty_one(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    files = {
        "from-verl": {"algorithm": {"rollout_correction": TOKEN_IS}},
        "from-trl": {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
    }
    for translator, keys in files.items():
        theirs = tmp_path / "theirs.yaml"
        theirs.write_text(yaml.safe_dump(keys))
        assert main(["config", command, str(theirs)]) == 2
        assert re.search(f"neither the key `mis:` nor .*`config {translator}`", capsys.readouterr().err)


# ------------------------------------------------------------------------------------------------------------ AReaL

SEGMENT_WISE = SegmentWiseConfig(fresh_tokens="behavior_at_age_0", clip_against="proximal")
CAPPED = {"behav_imp_weight_cap": 5.0, "behav_imp_weight_floor": 0.2, "use_decoupled_loss": True}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"rollout": {"enable_segment_wise_ppo": True, "max_head_offpolicyness": 2}, "actor": CAPPED},
         CorrectionConfig(WeightConfig("token", "zero", 0.2, 5.0), segment_wise=SEGMENT_WISE)),
        ({"enable_segment_wise_ppo": False, "actor": CAPPED},
         CorrectionConfig(WeightConfig("token", "zero", 0.2, 5.0), segment_wise=SegmentWiseConfig(False))),
        ({"enable_segment_wise_ppo": True, "rollout": {"enable_segment_wise_ppo": True}, **CAPPED},
         CorrectionConfig(WeightConfig("token", "zero", 0.2, 5.0), segment_wise=SEGMENT_WISE)),
        ({"enable_segment_wise_ppo": True, "behav_imp_weight_cap": None},
         CorrectionConfig(WeightConfig(bound="none"), segment_wise=SEGMENT_WISE)),
        ({"behav_imp_weight_cap": 5, "use_decoupled_loss": True},
         CorrectionConfig(WeightConfig("token", "zero", 0.0, 5.0))),
        ({"actor": {"behav_imp_weight_cap": "5", "path": "x", "temperature": "${gconfig.temperature}"}},
         preset("areal-behav-imp-weight-cap")),
        ({"actor": {"use_decoupled_loss": False, "rejection_sampling": {"upper": 3.0}}},
         CorrectionConfig(objective=ObjectiveConfig(old="behavior"), segment_wise=SegmentWiseConfig(False))),
        ({"actor": {"use_decoupled_loss": True, "rejection_sampling": {"level": "token", "action": "mask"}}},
         CorrectionConfig(WeightConfig("token", "none"), (RejectRule(over="token", upper=5.0),))),
        ({"rejection_sampling": {"action": "clamp", "upper": 3}},
         CorrectionConfig(WeightConfig("token", "clip", 0.0, 3.0))),
        ({"rejection_sampling": {"action": "clamp", "level": "sequence", "lower": 0.5}},
         CorrectionConfig(WeightConfig("geometric", "clip", 0.5, 5.0))),
        ({"rejection_sampling": {"action": "clamp", "level": "sequence", "agg": "max"}},
         CorrectionConfig(WeightConfig("geometric", "clip", 0.0, 5.0))),
        ({"rejection_sampling": {"level": "sequence", "lower": 0.5, "agg": "sum"}},
         CorrectionConfig(WeightConfig("geometric", "none"), (RejectRule(over="sum", lower=0.5, upper=5.0),))),
        ({"rejection_sampling": {"level": "sequence", "metric": "kl_k1", "agg": "max", "upper": 0.5, "lower": -2}},
         CorrectionConfig(WeightConfig("token", "none"), (RejectRule("k1", "min", -0.5, 2.0),))),
        ({"actor": {"use_sapo_loss": True}}, preset("areal-sapo")),
        ({"actor": {"use_sapo_loss": True, "use_decoupled_loss": False, "sapo_tau_neg": 2, "sapo_tau_pos": 0.5,
                    "recompute_logprob": True, "importance_sampling_level": "sequence",
                    "rejection_sampling": {"upper": 3.0}}},
         CorrectionConfig(objective=ObjectiveConfig("sapo", ratio="sequence", tau_pos=0.5, tau_neg=2.0))),
        ({"actor": {"use_sapo_loss": False, "m2_threshold": 0.04, "use_decoupled_loss": True,
                    "rejection_sampling": {"upper": 3.0}}},
         CorrectionConfig(WeightConfig("token", "none"), (RejectRule(over="token", upper=3.0),), m2_threshold=0.04)),
        ({"actor": {"m2_threshold": 0.04, "rejection_sampling": {"level": "sequence", "upper": 3.0}}},
         CorrectionConfig(WeightConfig("geometric", "none"), (RejectRule(over="mean", upper=3.0),), aggregate="kept",
                          m2_threshold=0.04)),
        ({"actor": {"m2_threshold": 0.04, "rejection_sampling": {"action": "clamp", "level": "sequence"}}},
         CorrectionConfig(WeightConfig("geometric", "clip", 0.0, 5.0), aggregate="kept", m2_threshold=0.04)),
        ({"actor": {"use_sapo_loss": True, "m2_threshold": "1e-2"}}, preset("areal-sapo")),
        ({"actor": {"use_decoupled_loss": False, "m2_threshold": 0.04, "behav_imp_weight_cap": 5}},
         CorrectionConfig(objective=ObjectiveConfig(old="behavior"), segment_wise=SegmentWiseConfig(False))),
        ({"actor": {"behave_imp_weight_cap": 3.0}},
         CorrectionConfig(WeightConfig("token", "none"), (RejectRule(over="token", upper=3.0),))),
        ({"actor": {"behave_imp_weight_mode": "sequence_truncate", "use_decoupled_loss": True}},
         CorrectionConfig(WeightConfig("geometric", "clip", 0.0, 5.0))),
        ({"actor": {"use_decoupled_loss": True, "behave_imp_weight_mode": "disabled"}}, CorrectionConfig()),
        ({"actor": {"use_decoupled_loss": True}}, CorrectionConfig()),
        # as AReaL saves the config of a run: each key is in it
        ({"actor": {"use_decoupled_loss": True, "rejection_sampling": None, "m2_threshold": None}}, CorrectionConfig()),
        ({"actor": {"use_decoupled_loss": True, "rejection_sampling": None, "m2_threshold": 0.04}},
         CorrectionConfig(m2_threshold=0.04)),
        ({"actor": {"use_decoupled_loss": True, "m2_threshold": 0.04}}, CorrectionConfig(m2_threshold=0.04)),
        ({"rejection_sampling": {"metric": "kl_k2", "upper": 0.5}},
         CorrectionConfig(WeightConfig("token", "none"), (RejectRule("k2", "token", upper=0.5),))),
    ],
)  # fmt: skip
def test_areals_yaml(tree: dict, expected: CorrectionConfig, tmp_path: Path):
    translation = areal.translate(yaml.safe_dump(tree))
    assert translation.config() == expected
    assert read_back(translation, tmp_path) == expected


IDLE = "actor.m2_threshold, actor.rejection_sampling: without use_decoupled_loss: true nothing comes of it in AReaL"
FRESH = "a token that the trainer's own version wrote weighs 1"


@pytest.mark.parametrize(
    ("actor", "said", "unsaid"),
    [
        *(({one: True, "use_decoupled_loss": False, "m2_threshold": 0.04, "rejection_sampling": {}}, IDLE, "not finite")
          for one in ("use_sapo_loss", "log_agent_stats")),
        ({"use_decoupled_loss": True, "m2_threshold": 0.04}, "of each micro-batch in AReaL as here", "nothing comes"),
        ({"use_decoupled_loss": False}, "AReaL averages over all tokens", "weighs nothing without"),
        ({"use_decoupled_loss": True, "eps_clip": 0.4, "c_clip": 3},
         "actor.eps_clip, actor.c_clip: pass --eps-clip 0.4 --eps-clip-high 0.4 --eps-clip-c 3.", ""),
        ({"use_decoupled_loss": True, "eps_clip": "${e}"}, "actor.eps_clip: ${e} is for the launch", "pass --eps"),
        ({"use_sapo_loss": True, "eps_clip": 0.4}, "AReaL averages over all tokens", "eps-clip"),
        ({"behav_imp_weight_cap": 5, "enable_segment_wise_ppo": True}, FRESH, ""),
        ({"behav_imp_weight_cap": 5, "enable_segment_wise_ppo": False}, "", FRESH),
    ],
)  # fmt: skip
def test_areals_notes(actor: dict, said: str, unsaid: str):
    """Without the decoupled loss AReaL's proximal policy is mu itself, so that M2PO and rules find no token."""
    told = " ".join(areal.translate(yaml.safe_dump({"actor": actor})).notes)
    assert said in told and (not unsaid or unsaid not in told)


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


def test_areals_own_file_is_refused_by_the_check_which_names_the_translator(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    file = tmp_path / "areal.yaml"
    file.write_text(yaml.safe_dump({"seed": 1, "actor": CAPPED | {"path": "x"}}))
    assert main(["config", "check", str(file)]) == 2
    assert "actor.behav_imp_weight_cap, actor.behav_imp_weight_floor" in (said := capsys.readouterr().err)
    assert "config from-areal" in said


def test_a_command_that_is_gone_names_what_takes_its_place(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        main(["config", "from-miles", "mis.yaml"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "pass it as --custom-config-path FILE" in told and "`config check FILE`" in told
    with pytest.raises(SystemExit):
        main(["config", "--help"])
    assert "from-miles" not in capsys.readouterr().out


FRAMEWORKS = {"verl": verl, "ms-swift": ms_swift, "AReaL": areal, "TRL": trl, "prime-rl": prime_rl}
REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
CASES = [(framework, case) for framework in REFUSED for case in REFUSED[framework]]


@pytest.mark.parametrize(("framework", "case"), CASES, ids=lambda value: str(value)[:60])
def test_what_cannot_be_translated_is_refused(framework: str, case: dict) -> None:
    """By the user's own keys."""
    said = case["said"] if isinstance(case["said"], str) else yaml.safe_dump(case["said"])
    with pytest.raises(ConfigError, match=case["told"]):
        FRAMEWORKS[framework].translate(said, case.get("behind", ())).text()
