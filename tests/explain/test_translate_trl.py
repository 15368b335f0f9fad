"""TRL's GRPOConfig, translated: by yaml, command line and Python call; TRL's own functions judge in tests/peers."""

import pytest
import yaml

from mis_plugins.__main__ import load
from mis_plugins.config.loading import preset_path
from mis_plugins.config.model import CorrectionConfig, ObjectiveConfig, OpsmConfig, WeightConfig
from mis_plugins.explain.translate.script import Asked
from mis_plugins.explain.translate.translation import Translation
from mis_plugins.explain.translate.trl import (
    CAP,
    CLIP_MAX,
    CLIP_MIN,
    CORRECTION,
    DELTA,
    MODE,
    MODES,
    NO_BOUND,
    translate,
)

BY_DEFAULT = CorrectionConfig(WeightConfig("sequence", "zero", 0.0, 3.0))


def of(keys: dict | str, *behind: str) -> Translation:
    return translate(keys if isinstance(keys, str) else yaml.safe_dump({"use_vllm": True} | keys), behind)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["{key}: {value}\n", "trl grpo --{key} {value}", "trl grpo --{key}={value}",
                                  "GRPOConfig({key}='{value}', use_vllm=True)"])  # fmt: skip
def test_modes_are_the_presets(mode: str, form: str):
    found = translate(form.format(key=MODE, value=mode)).config()
    assert found == load(preset_path(f"trl-{mode.replace('_', '-')}"))


@pytest.mark.parametrize(
    ("keys", "meant"),
    [
        ({}, BY_DEFAULT),
        ({CORRECTION: False}, CorrectionConfig()),
        ({"use_vllm": False, MODE: "token_mask"}, CorrectionConfig()),
        ({CAP: 2.0, CLIP_MAX: 4.0}, CorrectionConfig(WeightConfig("sequence", "zero", 0.0, 2.0))),
        ({MODE: "token_truncate", CLIP_MIN: 0.5}, CorrectionConfig(WeightConfig("token", "clip", 0.5, 3.0))),
        ({MODE: "token_mask", CLIP_MIN: 0.5}, CorrectionConfig(WeightConfig("token", "zero", 0.5, 3.0))),
        ({CLIP_MAX: None}, CorrectionConfig(WeightConfig("sequence", "none"))),
        ({CLIP_MAX: None, CLIP_MIN: 0.5}, CorrectionConfig(WeightConfig("sequence", "zero", 0.5, NO_BOUND))),
        ({CORRECTION: False, DELTA: 0.5}, CorrectionConfig(opsm=OpsmConfig(0.5, "sequence"))),
        ({"use_vllm": False, DELTA: 0.5}, CorrectionConfig(opsm=OpsmConfig(0.5, "sequence", "proximal"))),
        ({CORRECTION: False, "loss_type": "cispo", "beta": 0.1},
         CorrectionConfig(objective=ObjectiveConfig("cispo", unbiased_kl=True))),
        ({CORRECTION: False, "loss_type": "cispo", "importance_sampling_level": "sequence"},
         CorrectionConfig(objective=ObjectiveConfig("cispo", ratio="sequence"))),
        ({CORRECTION: False, "loss_type": "sapo", "sapo_temperature_neg": 2},
         CorrectionConfig(objective=ObjectiveConfig("sapo", tau_neg=2.0))),
        ({MODE: "token_truncate", "loss_type": "sapo", "importance_sampling_level": "sequence"},
         CorrectionConfig(WeightConfig(upper=3.0), objective=ObjectiveConfig("sapo", ratio="sequence"))),
        ({CORRECTION: False, "loss_type": "vespo", "vespo_k_pos": 1, "vespo_lambda_neg": 0.5},
         CorrectionConfig(objective=ObjectiveConfig("vespo", k_pos=1.0, lambda_neg=0.5))),
    ],
)  # fmt: skip
def test_settings_mean(keys: dict, meant: CorrectionConfig):
    assert of(keys).config() == meant


@pytest.mark.parametrize("loss", ["cispo", "sapo", "vespo"])
def test_a_loss_of_its_own_is_read_without_a_correction(loss: str):
    for text in (f"loss_type: {loss}", f"GRPOConfig(loss_type='{loss}')", f"trl grpo --loss_type {loss}"):
        found = translate(text)
        assert found.config() == CorrectionConfig(objective=ObjectiveConfig(loss))  # type: ignore[arg-type]
        assert "use_vllm is not in it" in " ".join(found.notes)


COMMANDS = [
    (f"trl grpo --use_vllm --no_{CORRECTION}", CorrectionConfig()),
    (f"trl grpo --use-vllm true --no-{CORRECTION.replace('_', '-')}", CorrectionConfig()),
    ("accelerate launch --config_file ds.yaml grpo_vlm.py --use_vllm", BY_DEFAULT),
    ("cat > recipes/grpo.yaml <<EOF\nuse_vllm: true\nEOF\n"
     "accelerate launch --config_file ds.yaml train_rl.py --config recipes/grpo.yaml", BY_DEFAULT),
    ("conda run -n trl accelerate launch grpo.py --use_vllm", BY_DEFAULT),
    ("python examples/rloo_vs_grpo/train_grpo.py --use_vllm true", BY_DEFAULT),
    ("python train_gold_prices.py --use_vllm true --vllm_importance_sampling_mode sequence_mask", BY_DEFAULT),
    ("trl vllm-serve --model q\naccelerate launch grpo.py --run_name trl --use_vllm --output_dir rloo.py", BY_DEFAULT),
    ("docker exec trl accelerate launch train_grpo.py --use_vllm", BY_DEFAULT),
    ("trl grpo --tags grpo trl vllm --use_vllm", BY_DEFAULT),
    ("trl rloo --use_vllm --output_dir a\ntrl grpo --use_vllm", BY_DEFAULT),
    ("accelerate launch golden.py --use_vllm", BY_DEFAULT),
    (f"trl grpo --use_vllm --{CLIP_MAX} None", CorrectionConfig(WeightConfig("sequence", "none"))),
    ("cat > g.yaml <<EOF\nuse_vllm: true\nvllm_importance_sampling_cap: 2.0\nEOF\ntrl grpo --config g.yaml",
     CorrectionConfig(WeightConfig("sequence", "zero", 0.0, 2.0))),
    (f"cat > g.yaml <<EOF\nuse_vllm: true\n{MODE}: token_mask\nEOF\ntrl grpo --config g.yaml --{MODE} token_truncate",
     CorrectionConfig(WeightConfig(upper=3.0))),
]  # fmt: skip


@pytest.mark.parametrize(("script", "meant"), COMMANDS)
def test_command_lines_mean(script: str, meant: CorrectionConfig):
    assert of(script).config() == meant


@pytest.mark.parametrize("said", [f"{DELTA}: 0.5", f"trl grpo --{DELTA} 0.5"])
def test_without_vllm_nothing_is_corrected_by_default(said: str):
    """TRL samples with the trainer itself there, so that OPSM compares with pi_old."""
    found = translate(said)
    assert found.config() == CorrectionConfig(opsm=OpsmConfig(0.5, "sequence", "proximal"))
    assert "corrects nothing; so does this file, OPSM aside" in " ".join(found.notes)


def test_settings_behind_the_file_win():
    assert of({MODE: "token_mask"}, f"--{MODE.replace('_', '-')}=token_truncate", f"{CLIP_MAX}=2").config() == (
        CorrectionConfig(WeightConfig())
    )


NOTES = [
    ({}, f"TRL 1.16 corrects by default: {CORRECTION}: true, {MODE}: sequence_mask, {CLIP_MAX}: 3.0, where", ""),
    ({MODE: "token_mask", CORRECTION: True, CAP: 2.0}, "", "by default"),
    ({CORRECTION: False}, f"{CORRECTION}: false corrects nothing in TRL.", "by default: vllm"),
    ({"use_vllm": False}, "use_vllm: false corrects nothing in TRL.", "by default: vllm"),
    (f"{MODE}: token_mask", "use_vllm is not in it: TRL has it false by default", ""),
    ({}, "loss_type: dapo, TRL's default, averages over all tokens, as the hosts do with --calculate-per", "eps-clip"),
    ({"loss_type": "grpo"}, "loss_type: grpo averages each response and then all", ""),
    ({"loss_type": "dr_grpo"}, "dr_grpo divides by max_completion_length, which no flag", ""),
    ({"importance_sampling_level": "sequence"}, "sequence is --advantage-estimator gspo of the hosts", ""),
    ({"beta": 0.04}, "--kl-loss-coef 0.04 --kl-loss-type low_var_kl --use-unbiased-kl", ""),
    ({"beta": 0.04, "use_bias_correction_kl": False}, "low_var_kl.", "unbiased"),
    ({"beta": 0.0}, "", "kl-loss"),
    ({"epsilon_high": 0.28, "delta": 4}, "pass --eps-clip 0.2 --eps-clip-high 0.28 --eps-clip-c 4.", ""),
    ({"loss_type": "cispo", "epsilon_high": 5}, "pass --eps-clip 1 --eps-clip-high 4.", "epsilon_high is not"),
    ({"loss_type": "cispo"}, "--eps-clip-high -0.8. epsilon_high is not in it: CISPO then cuts every", ""),
    ({"top_entropy_quantile": 0.2}, "top_entropy_quantile: 0.2 keeps tokens of high entropy alone", ""),
    *(({"top_entropy_quantile": one, "mask_truncated_completions": "no", "entropy_coef": 0}, "", "entropy")
      for one in (1.0, 1)),
    ({"entropy_coef": 0.01}, "entropy_coef: 0.01 of an entropy bonus is --entropy-coef of the hosts", ""),
    ({"use_adaptive_entropy": True}, "use_adaptive_entropy: true moves entropy_coef", ""),
    ({"sapo_temperature_neg": 1.05, "vespo_k_pos": 2}, "sapo_temperature_neg, vespo_k_pos: without effect in TRL", ""),
    ({"loss_type": "sapo", "sapo_temperature_neg": 2, "epsilon": 0.2}, "", "eps-clip"),
    ({"loss_type": "sapo", "sapo_temperature_neg": 2}, "", "without effect"),
    ({"mask_truncated_completions": True}, "mask_truncated_completions: true drops truncated responses", ""),
    ({CLIP_MAX: None, CLIP_MIN: 0.5}, f"{CLIP_MAX}: null: 1e+09 stands for no upper bound", ""),
    ("trl grpo --use_vllm --epsilon $E", 'epsilon: $E is for the launch to decide; put epsilon=VALUE behind', ""),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "said", "unsaid"), NOTES)
def test_notes(keys: dict | str, said: str, unsaid: str):
    told = " ".join(of(keys).notes)
    assert said in told and (not unsaid or unsaid not in told)


def test_a_call_of_gmpo_is_gmpo_alone():
    """GMPOTrainer's loss reads neither vLLM's correction nor a mask of sequences, whatever its config says."""
    assert translate("GMPOConfig()").config() == load(preset_path("gmpo"))
    found = translate(f"GMPOConfig(use_vllm=True, {MODE}='token_mask', {DELTA}=0.1, beta=0.1, epsilon_high=0.5)")
    assert found.config() == load(preset_path("gmpo"))
    told = " ".join(found.notes)
    for said in (f"nothing comes of {MODE}, {DELTA} in TRL", "--eps-clip 0.4 --eps-clip-high 0.5", "low_var_kl."):
        assert said in told


CALL = "config = trl.GRPOConfig(\n    use_vllm=True, vllm_importance_sampling_clip_max={value},\n)\n{more}"


def test_a_python_script_is_read_and_never_run(tmp_path):
    script = tmp_path / "train.py"
    text = "raise SystemExit\n" + CALL.format(value="2.0", more="print('\\d')\n")
    found = translate(text, asked=Asked(script)).config()
    assert found == CorrectionConfig(WeightConfig("sequence", "zero", 0.0, 2.0))
    behind = translate(CALL.format(value="CAP", more=""), [f"{CLIP_MAX}=2.0"], Asked(script)).config()
    assert behind == found


def test_a_call_whose_mapping_is_not_read_is_answered_behind_the_file():
    """`output_dir` may be the first argument; a note says of `**more` that nothing of it was read."""
    found = translate('GRPOConfig("out", **more)', ["use_vllm=true"])
    assert found.config() == BY_DEFAULT == translate('GRPOConfig("out", use_vllm=True)').config()
    assert "not read: **more; keys in it that count go behind the file" in " ".join(found.notes)
