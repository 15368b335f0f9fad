"""Other packages' corrections, called as installed, against ours: weights, masks, losses, gradients, metrics.

Runs under `bash scripts/peers.sh`, which installs them. What differs is in test_peer_differences.py.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import yaml
from batches import make_batch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peers import areal, ms_swift, openrlhf, skyrl, trl, verl
from peers.loading import defaults
from peers.rows import (
    ADVANTAGES,
    Metric,
    Rows,
    assert_all_close,
    assert_same_metrics,
    assert_same_weights,
    clear_answer,
    clear_of,
    fixed_rows,
    keep_away,
    our_metrics,
    ours,
    preset,
    rows,
    surrogate_loss,
)
from tolerances import DECISION
from torch import Tensor

from lab.break_it import peers as hostile
from lab.break_it.__main__ import tried
from lab.pages.metrics import OTHERWISE
from mis_plugins.config.loading import preset_path
from mis_plugins.config.model import OpsmConfig
from mis_plugins.config.reading import from_mapping
from mis_plugins.config.terms.surrogates import SURROGATES
from mis_plugins.correction.opsm import on_policy
from mis_plugins.correction.pipeline import Correction
from mis_plugins.errors import ConfigError
from mis_plugins.explain.translate import areal as from_areal
from mis_plugins.explain.translate import trl as from_trl
from mis_plugins.explain.translate import verl_presets
from mis_plugins.explain.translate.verl import translate
from mis_plugins.loss.objective import DPPO_CAP, Clip, kl_term, policy_term, target_log_ratio
from mis_plugins.loss.token_baseline import token_advantages
from mis_plugins.report.readers.curves import PEERS

CLIP, DUAL_CLIP, PPO = Clip(0.2, 0.28), Clip(0.2, 0.28, 3.0), {"surrogate": "clip"}
GSPO, CISPO = PPO | {"ratio": "sequence"}, {"surrogate": "cispo"}
few = settings(max_examples=40)  # for a test that is one of many alike

# ---------------------------------------------------------------------------------------------------- losses


def token_losses(
    batch: Rows, correction: Correction, objective: dict = PPO, clip: Clip = CLIP
) -> tuple[Tensor, Tensor]:
    """(pi_theta's log-probs, our corrected loss of every token), `[N, L]` each."""
    target = batch.pad(batch.target).requires_grad_()
    old = batch.behavior if objective.get("old") == "behavior" else batch.proximal
    return target, surrogate_loss(batch, target, old, correction, objective, clip)


def plain_losses(batch: Rows, objective: dict, clip: Clip = CLIP) -> tuple[Tensor, Tensor]:
    """The target's log-probs and the loss of every token, `[N, L]` each, where the config corrects nothing."""
    return token_losses(batch, ours(batch, {"weight": None}), objective, clip)


def assert_same_gradient(
    batch: Rows, theirs: Callable[[Tensor], Tensor], target: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the sum of our losses is that of theirs; both are returned."""
    their_target = batch.pad(batch.target).requires_grad_()
    (our_gradient,) = torch.autograd.grad(tokens.sum(), target, retain_graph=True)
    (their_gradient,) = torch.autograd.grad(theirs(their_target), their_target)
    assert_all_close(our_gradient, their_gradient, batch.rtol, "gradient", atol=batch.rtol * 1e-12)
    return our_gradient, their_gradient


def assert_same_loss(batch: Rows, theirs: Callable[[Tensor], Tensor], target: Tensor, tokens: Tensor) -> None:
    """The loss and its gradient; `tokens` are our losses, each divided by what theirs is divided by."""
    size = tokens.detach().abs().sum().item()
    assert abs(tokens.sum().item() - theirs(batch.pad(batch.target)).item()) <= batch.rtol * size
    assert_same_gradient(batch, theirs, target, tokens)


# ------------------------------------------------------------------------------------------------------ verl

k1_thresholds = st.sampled_from(["0.5_2.0", "0.6_1.4", "1.5", "0.99_1.001"])
other_thresholds = st.floats(1e-4, 1.0).map(str)
OPTIONS = ["token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
           "seq_mean_k3", "seq_max_k2", "seq_max_k3"]  # fmt: skip


@st.composite
def verl_settings(draw: Callable) -> dict:
    options = draw(st.lists(st.sampled_from(OPTIONS), max_size=3, unique=True))
    thresholds = [draw(k1_thresholds if x.endswith("k1") else other_thresholds) for x in options]
    return {
        "rollout_is": draw(st.sampled_from([None, "token", "sequence"])),
        "rollout_is_threshold": draw(st.sampled_from([1.5, 2.0, "0.5_5.0", "0.9_1.1"])),
        "rollout_is_batch_normalize": draw(st.booleans()),
        "rollout_rs": ",".join(options) or None,
        "rollout_rs_threshold": ",".join(thresholds) or None,
    }


def compared_with_mu(name: str, batch: Rows) -> list[Tensor]:
    """verl's bypass mode weighs pi_theta / mu."""
    return batch.target if name.startswith("bypass") else batch.batch.proximal


def weighs_something(batch: Rows, mapping: dict, proximal: list[Tensor]) -> Correction:
    """Our answer, unless every weight is 0: verl divides by that, see `test_verl_all_zero_differs`."""
    correction = clear_answer(batch, mapping, proximal)
    assume(bool(correction.weights.any()))
    return correction


def test_verl_every_preset_is_compared():
    theirs = [name for name, value in vars(verl.rollout_config()).items() if isinstance(value, classmethod)]
    assert sorted(theirs) == sorted(verl.PRESETS)


@pytest.mark.parametrize("name", verl.PRESETS)
@few
@given(batch=rows())
def test_verl_preset(name: str, batch: Rows):
    proximal = compared_with_mu(name, batch)
    correction = weighs_something(batch, preset(f"verl-{name}"), proximal)
    weights, mask, _ = verl.correction(batch, verl.preset(name), batch.pad(proximal))
    assert_same_weights(batch, correction, weights, mask)


@pytest.mark.parametrize("name", verl.PRESETS)
def test_verl_preset_by_its_name_is_what_its_class_method_sets(name: str):
    """With the defaults, and with another value for each parameter, by name and by position."""
    parameters = list(inspect.signature(getattr(verl.rollout_config(), name)).parameters)
    assert parameters == list(verl_presets.PRESETS[name].parameters())
    thresholds = {"rs_threshold": "'0.25_3.5'" if "k3" not in name else "0.125", "threshold_lower": "0.25"}
    words = [thresholds.get(parameter, "7.5") for parameter in parameters]
    named = ", ".join(f"{parameter}={word}" for parameter, word in zip(parameters, words, strict=True))
    for arguments in ("", ", ".join(words), named):
        theirs = eval(f"config.{name}({arguments})", {"config": verl.rollout_config()})
        ours = verl_presets.keys_of(f"{name}({arguments})")
        assert ours == {key: getattr(theirs, key) for key in ours}
        said = {key: value for key, value in vars(theirs).items() if not key.startswith("_")}
        ignored = {"rollout_is_threshold", "loss_type"}  # without a level, without the bypass
        assert {
            key for key in said if said[key] != verl.rollout_config()(rollout_is=None).__dict__[key]
        } - ignored <= set(ours)
        assert translate(f"{name}({arguments})").config() == translate(yaml.safe_dump(said)).config()


def test_verl_the_class_of_the_presets_has_the_defaults_that_the_translator_takes_for_granted():
    theirs = {key: value for key, value in vars(verl.rollout_config()()).items() if not key.startswith("_")}
    assert verl_presets.keys_of("RolloutCorrectionConfig()") == theirs


@pytest.mark.parametrize("name", ["algorithm/rollout_correction.yaml", "_generated_ppo_trainer.yaml"])
def test_verl_files_of_its_own_are_translated(name: str):
    """As they lie in the package, where they correct nothing, and with what a command line sets in them."""
    text = (verl.folder() / name).read_text()
    assert dict(translate(text).mis) == {"metrics": "watch"}
    asked = {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
    overrides = [f"algorithm.rollout_correction.{key}={value}" for key, value in asked.items()]
    found = from_mapping(dict(translate(text, overrides).mis))
    assert found == from_mapping(preset("verl-decoupled-geo-rs-token-tis") | {"metrics": "watch"})


@given(batch=rows(dead=True), chosen=verl_settings())
def test_verl_any_settings(batch: Rows, chosen: dict):
    assume(bool(batch.mask.any()))
    correction = weighs_something(batch, verl.mapping_of(chosen), batch.batch.proximal)
    weights, mask, _ = verl.correction(batch, chosen)
    assert_same_weights(batch, correction, weights, mask)


@pytest.mark.parametrize("name", verl.PRESETS)
@few
@given(batch=rows())
def test_verl_preset_loss(name: str, batch: Rows):
    mapping, chosen = preset(f"verl-{name}"), verl.preset(name)
    correction = weighs_something(batch, mapping, compared_with_mu(name, batch))
    theirs = verl.bypass_loss if chosen.bypass_mode else verl.decoupled_loss
    target, tokens = token_losses(batch, correction, mapping.get("objective", {}), DUAL_CLIP)
    assert_same_loss(batch, lambda x: theirs(batch, x, chosen, "token-sum"), target, tokens)


# What a rule over tokens reports of a sequence is its mean, which the rule does not compare and no margin watches.
@given(batch=rows(), chosen=verl_settings())
def test_verl_metrics(batch: Rows, chosen: dict):
    mapping = verl.mapping_of(chosen)
    watch_means(batch, mapping)
    correction = weighs_something(batch, mapping, batch.batch.proximal)
    assume(correction.weights.sum() > batch.mask.sum() / 10)  # verl adds 1e-8 to what it divides by
    _, _, theirs = verl.correction(batch, chosen)
    table = verl.metric_table(chosen)
    assert set(theirs) <= set(table)
    assert_same_metrics(batch, our_metrics(batch, mapping), theirs, table, verl.FLOOR)


def watch_means(batch: Rows, mapping: dict) -> None:
    """Keep clear of the bounds that only metrics compare with."""
    if mapping["weight"]:
        upper = mapping["weight"]["upper"]
        clear_of(batch, [upper, 1 / upper, mapping["weight"].get("lower", upper)])
    tokens = [rule | {"over": "mean"} for rule in mapping["reject"] if rule["over"] == "token"]
    keep_away(batch, {"weight": None, "reject": tokens})


@given(batch=rows(dead=True))
def test_verl_probability_metrics(batch: Rows):
    probabilities = [x.exp()[batch.mask.bool()] for x in (batch.proximal, batch.behavior)]
    assume(all(x.numel() > 1 and x.std() > 0.05 for x in probabilities))
    found = our_metrics(batch, {"weight": None})
    assert_same_metrics(batch, found, verl.debug_metrics(batch), verl.PROBABILITIES)


# ------------------------------------------------------------------------------------------------------- TRL

TRL_BOUNDS = st.fixed_dictionaries(
    {},
    optional={
        from_trl.CLIP_MAX: st.sampled_from([1.2, 2.0, 3.0, None]),
        from_trl.CLIP_MIN: st.sampled_from([0.5, 0.9, None]),
    },
)


@pytest.mark.parametrize("chosen", [{}, *({from_trl.MODE: mode} for mode in trl.MODES)], ids=str)
@given(batch=rows(dead=True), bounds=TRL_BOUNDS)
def test_trl_modes(chosen: dict, batch: Rows, bounds: dict):
    """Files through `config from-trl`: TRL's weights by TRL's defaults for keys left out, or refused as TRL refuses."""
    keys = chosen | bounds
    text = yaml.safe_dump({"use_vllm": True} | keys)
    mode, upper, lower = (keys.get(name, trl.grpo_defaults()[name]) for name in trl.KEYS)
    if upper is None and lower is None and mode.endswith("truncate"):
        with pytest.raises(ConfigError, match="TRL refuses"):
            from_trl.translate(text)
        return
    correction = clear_answer(batch, dict(from_trl.translate(text).mis))
    ratio, _ = trl.correction(batch, mode, upper, lower)
    assert_same_weights(batch, correction, ratio.expand_as(batch.mask), batch.mask)


def test_trl_defaults_are_those_that_the_translator_takes_for_granted():
    granted = {"use_vllm": False, from_trl.CLIP_MIN: None, from_trl.CAP: None, from_trl.DELTA: None, "beta": 0.0,
               from_trl.UNBIASED: True, "loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2,
               "epsilon_high": None, "delta": None}  # fmt: skip
    unserved = {key: default for key, (default, _) in from_trl.UNSERVED.items()}
    theirs = trl.grpo_defaults()
    for taken in (from_trl.DEFAULTS, granted, unserved):
        assert taken == {key: theirs[key] for key in taken}
    # what a saved config of TRL's holds, with every key in it
    every = {key: theirs[key] for key in from_trl.READ}
    dumped = from_trl.translate(yaml.safe_dump(every | {"use_vllm": True})).config()
    assert dumped == from_trl.translate("use_vllm: true").config()


@pytest.mark.parametrize("mode", trl.MODES)
@few
@given(batch=rows())
def test_trl_metrics(mode: str, batch: Rows):
    mapping = preset(f"trl-{mode}")
    keep_away(batch, mapping)
    _, theirs = trl.correction(batch, mode)
    table = trl.metric_table(mode)
    assert set(theirs) == set(table)
    assert_same_metrics(batch, our_metrics(batch, mapping), theirs, table)


@given(batch=rows(dead=True), delta=st.sampled_from([0.0, 1e-4, 0.01, 0.1]))
def test_trl_and_ms_swift_off_policy_masks(batch: Rows, delta: float):
    expected = off_policy(batch, delta)
    kept = batch.padded(expected).bool() | ~batch.mask.bool()
    for found in (trl.off_policy_mask(batch, delta), ms_swift.off_policy_mask(batch, delta)[:, None]):
        assert torch.equal(kept, found.bool() | ~batch.mask.bool())


def off_policy(batch: Rows, delta: float) -> Tensor:
    """Our mask `[R]`, for a batch of which no sequence lies on the bound."""
    mean = ((batch.behavior - batch.pad(batch.target)) * batch.mask).sum(-1) / batch.mask.sum(-1).clamp(min=1)
    assume(bool(((mean - delta).abs() > DECISION).all()))
    log_probs = batch.packed(batch.pad(batch.target)), batch.packed(batch.behavior)
    advantages = batch.packed(batch.token_advantages)
    return on_policy(*log_probs, advantages, batch.ragged, OpsmConfig(delta, "sequence"))


def mean_of_means(batch: Rows, tokens: Tensor) -> Tensor:
    """Each token's part of what TRL and ms-swift call `grpo`: the mean over responses of the mean over tokens."""
    return tokens * batch.mask / batch.mask.sum(-1, keepdim=True).clamp(min=1) / len(batch.mask)


@pytest.mark.parametrize("mode", trl.MODES)
@pytest.mark.parametrize("unbiased", [False, True])
@few
@given(batch=rows(), delta=st.sampled_from([None, 0.01]))
def test_trl_loss(mode: str, unbiased: bool, batch: Rows, delta: float | None):
    correction, beta = clear_answer(batch, preset(f"trl-{mode}")), 0.1
    if delta is not None:
        correction = restricted(correction, off_policy(batch, delta))
    target, tokens = token_losses(batch, correction)
    reference = batch.proximal - 0.1
    tokens = tokens + beta * kl_tokens(batch, target, reference, unbiased)
    ratio, _ = trl.correction(batch, mode)
    arguments = SimpleNamespace(use_bias_correction_kl=unbiased, delta=None, steps_per_generation=1)
    theirs = lambda x: trl.loss(  # noqa: E731
        batch, x, ratio, reference, beta=beta, args=arguments, off_policy_mask_threshold=delta
    )
    assert_same_loss(batch, theirs, target, mean_of_means(batch, tokens))


def restricted(correction: Correction, mask: Tensor) -> Correction:
    """With 0 for the weight of what the mask drops, which leaves every denominator as it was."""
    return replace(correction, weights=torch.where(mask, correction.weights, 0))


def kl_tokens(batch: Rows, target: Tensor, reference: Tensor, unbiased: bool) -> Tensor:
    flat, mask = batch.flat(target), batch.ragged.loss_mask
    ratio = target_log_ratio(flat, batch.flat(batch.proximal), mask)[0] if unbiased else None
    return batch.padded(kl_term(flat, batch.flat(reference), mask, "k3", ratio))


@few
@given(batch=rows())
def test_trl_cispo(batch: Rows):
    correction = clear_answer(batch, preset("trl-token-truncate"))
    target, tokens = token_losses(batch, correction, CISPO, Clip(1.0, 1.0))
    ratio, _ = trl.correction(batch, "token_truncate")
    theirs = lambda x: trl.loss(batch, x, ratio, loss_type="cispo", epsilon_high=2.0)  # noqa: E731
    assert_same_loss(batch, theirs, target, tokens / batch.mask.sum())


@few
@given(batch=rows())
def test_trl_sequence_ratio(batch: Rows):
    """GSPO."""
    target, tokens = token_losses(batch, clear_answer(batch, preset("trl-token-truncate")), GSPO)
    ratio, _ = trl.correction(batch, "token_truncate")
    theirs = lambda x: trl.loss(batch, x, ratio, importance_sampling_level="sequence")  # noqa: E731
    assert_same_loss(batch, theirs, target, mean_of_means(batch, tokens))


# -------------------------------------------------------------------------------------------------- ms-swift


@pytest.mark.parametrize("mode", ms_swift.MODES)
@given(batch=rows(dead=True), threshold=st.sampled_from([1.001, 1.2, 2.0]))
def test_ms_swift_modes(mode: str, batch: Rows, threshold: float):
    correction = clear_answer(batch, ms_swift.mapping_of(mode, threshold))
    weights = ms_swift.weights(batch, mode, threshold)
    kept = batch.padded(correction.keep)  # theirs keeps the mask, and weighs a rejected sequence by 0
    assert_same_weights(batch, correction, weights, kept)
    assert torch.equal(kept.bool() | (weights == 0), batch.mask.bool() | (weights == 0))


@pytest.mark.parametrize("mode", ms_swift.MODES)
@few
@given(batch=rows(), delta=st.sampled_from([None, 0.01]))
def test_ms_swift_loss(mode: str, batch: Rows, delta: float | None):
    """Weight and off-policy mask hit the KL term too (`weigh_kl`)."""
    correction, beta = clear_answer(batch, preset(f"ms-swift-{mode}")), 0.1
    kept = off_policy(batch, delta) if delta is not None else batch.ragged.loss_mask
    factor = batch.padded(torch.where(correction.keep & kept, correction.weights, 0))
    target, tokens = token_losses(batch, restricted(correction, kept))
    reference = batch.proximal - 0.1
    tokens = tokens + beta * factor * kl_tokens(batch, target, reference, unbiased=False)
    theirs = lambda x: ms_swift.loss(  # noqa: E731
        batch, x, reference, beta=beta, off_policy_sequence_mask_delta=delta, rollout_importance_sampling_mode=mode
    )
    assert_same_loss(batch, theirs, target, mean_of_means(batch, tokens))


@pytest.mark.parametrize("mode", ms_swift.MODES)
@few
@given(batch=rows())
def test_ms_swift_metrics(mode: str, batch: Rows):
    mapping = preset(f"ms-swift-{mode}")
    keep_away(batch, mapping)
    found, theirs = our_metrics(batch, mapping), ms_swift.mismatch_metrics(batch)
    assert set(theirs) == set(ms_swift.MISMATCH)
    assert_same_metrics(batch, found, theirs, ms_swift.MISMATCH)
    theirs, table = ms_swift.weight_metrics(batch, mode, 2.0), ms_swift.weight_table(mode)
    assert set(theirs) == set(table)
    assume(found["applied_valid_mean"] > 0.1)  # theirs adds 1e-8 to it
    assert_same_metrics(batch, found, theirs, table)


# ----------------------------------------------------------------------------------------------------- AReaL


@st.composite
def areal_settings(draw: Callable) -> dict:
    metric = draw(st.sampled_from(["ratio", "kl_k1", "kl_k2"]))
    level = draw(st.sampled_from(["token", "sequence"]))
    action = draw(st.sampled_from(["mask", "clamp"])) if metric == "ratio" else "mask"
    keys = {"metric": metric, "level": level, "action": action}
    if level == "sequence":
        keys["agg"] = draw(st.sampled_from(["sum", "mean", "max"]))
    lower = {"ratio": st.floats(0.3, 0.99), "kl_k1": st.floats(-1.0, -0.01), "kl_k2": st.nothing()}[metric]
    upper = st.floats(1.01, 3.0) if metric == "ratio" else st.floats(0.01, 1.0)
    largest = (action, keys.get("agg")) == ("clamp", "max")  # with a lower bound ours differs, see the other file
    return keys | {"lower": None if largest else draw(st.none() | lower), "upper": draw(upper)}


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("areal-rejection-sampling", lambda batch: areal.correction(batch, areal.settings())),
        ("skyrl-chain", lambda batch: skyrl.correction(batch, skyrl.settings(**skyrl.CHAIN))),
    ],
)
@given(batch=rows(dead=True))
def test_areal_and_skyrl_presets(name: str, theirs: Callable, batch: Rows):
    """AReaL's defaults, once rejection sampling is on at all, and SkyRL's chain of rules."""
    correction = clear_answer(batch, preset(name))
    weights, mask, _ = theirs(batch)
    assert_same_weights(batch, correction, weights, mask)


@st.composite
def areal_blocks(draw: Callable) -> dict:
    """Any `actor.rejection_sampling`, with any of its keys left to AReaL's defaults."""
    lower, upper = st.none() | st.sampled_from([-1.0, 0.0]) | st.floats(0.3, 0.99), st.floats(1.01, 3.0)
    values = {key: st.sampled_from(choices) for key, choices in from_areal.CHOICES.items()}
    keys = draw(st.fixed_dictionaries({}, optional=values | {"lower": lower, "upper": upper}))
    if keys.get("metric", "ratio") != "ratio":
        keys |= {
            "upper": draw(st.floats(0.01, 1.0)),
            "lower": draw(st.none() | st.floats(-1.0, 2**-8, width=32, allow_subnormal=False)),
        }
    return keys


def areal_unserved(config: Any) -> bool:
    """What `config from-areal` refuses and AReaL takes: see `test_areal_k3_differs` and the clamp beside it."""
    clamps_by_another = config.action == "clamp" and config.level == "sequence" and config.agg != "mean"
    return config.metric == "kl_k3" or bool(clamps_by_another and config.lower)


def test_areal_block_has_these_keys_defaults_and_choices():
    assert vars(areal.settings()) == from_areal.DEFAULTS
    assert {key: tuple(areal.said_of(key)["choices"]) for key in from_areal.CHOICES} == from_areal.CHOICES


def settings_served(block: dict) -> Any:
    """The settings of a block that AReaL and `config from-areal` take; an example with another block is skipped."""
    try:
        config = areal.settings(**block)
    except ValueError:
        assume(False)
    assume(not areal_unserved(config))
    return config


@settings(max_examples=200)  # half of them of either kind
@given(batch=rows(dead=True), block=areal_settings() | areal_blocks(), packed=st.booleans())
def test_areal_settings(batch: Rows, block: dict, packed: bool):
    """Random files of AReaL's through `config from-areal`: its own weights and mask, or refused by both."""
    try:
        config = areal.settings(**block)
    except ValueError:
        with pytest.raises(ConfigError, match="rejection_sampling"):
            areal.mapping_of(block)
        return
    if areal_unserved(config):
        with pytest.raises(ConfigError, match=r"actor\.rejection_sampling"):
            areal.mapping_of(block)
        return
    correction = clear_answer(batch, areal.mapping_of(block))
    weights, mask, _ = areal.correction(batch, config, packed)
    assert_same_weights(batch, correction, weights, mask)


@settings(max_examples=200)  # half of them of either kind
@given(batch=rows(), block=areal_settings() | areal_blocks())
def test_areal_loss(batch: Rows, block: dict):
    """The loss of a file, which AReaL divides by the tokens that were valid before rejection."""
    config = settings_served(block)
    mapping = dict(from_areal.translate(yaml.safe_dump({"actor": {"rejection_sampling": block}})).mis)
    objective = PPO | dict(mapping.get("objective") or {})
    target, tokens = token_losses(batch, clear_answer(batch, mapping), objective)
    assert_same_loss(batch, lambda x: areal.loss(batch, x, config)[0], target, tokens / batch.mask.sum())


@few
@given(batch=rows(), block=areal_settings())
def test_areal_metrics(batch: Rows, block: dict):
    config = settings_served(block)
    mapping = areal.mapping_of(block)
    assume(bool(clear_answer(batch, mapping).keep.any()))
    theirs, table = areal.metrics(batch, config), areal.metric_table(config)
    assert set(theirs) == set(table)
    assert_same_metrics(batch, our_metrics(batch, mapping), theirs, table)


# -------------------------------------------------------------------------------------------------- OpenRLHF


def test_openrlhf_every_correction_has_a_preset():
    """Level, mode and gate, as far as its constructor takes them together."""
    ours = [{"is_correction_gating": "ratio"} | chosen for chosen in openrlhf.PRESETS.values()]
    assert sorted(map(sorted, map(dict.items, openrlhf.settings_taken()))) == sorted(map(sorted, map(dict.items, ours)))


@pytest.mark.parametrize("name", sorted(openrlhf.PRESETS))
@pytest.mark.parametrize("by_token", [True, False])
@few
@given(batch=rows(), bounds=st.none() | st.tuples(st.floats(0.3, 0.99), st.floats(1.01, 3.0)))
def test_openrlhf_presets(name: str, by_token: bool, batch: Rows, bounds: tuple[float, float] | None):
    """With the presets' bounds, and others. Its loss alone says what it weighs a token by."""
    chosen = openrlhf.PRESETS[name]
    if "is_correction_gating" in chosen:
        bounds = bounds and (0.0, bounds[0] / 10)
        openrlhf.within_clamp(batch)
    mapping = openrlhf.mapping_of(bounds, chosen) if bounds else preset(f"openrlhf-{name}")
    target, tokens = token_losses(batch, clear_answer(batch, mapping))
    theirs = lambda x: openrlhf.loss(batch, x, bounds or openrlhf.bounds_of(chosen), by_token, **chosen)[0]  # noqa: E731
    parts = tokens / batch.mask.sum() if by_token else mean_of_means(batch, tokens)
    assert_same_loss(batch, theirs, target, parts)


@pytest.mark.parametrize("name", sorted(openrlhf.PRESETS))
@few
@given(batch=rows())
def test_openrlhf_metrics(name: str, batch: Rows):
    mapping = preset(f"openrlhf-{name}")
    keep_away(batch, mapping)
    openrlhf.within_clamp(batch)
    *_, vllm_kl, filtered = openrlhf.loss(
        batch, batch.pad(batch.target), openrlhf.bounds_of(openrlhf.PRESETS[name]), **openrlhf.PRESETS[name]
    )
    theirs = {"vllm_kl": vllm_kl.item(), "is_filter_ratio": filtered.item()}
    assert_same_metrics(batch, our_metrics(batch, mapping), theirs, openrlhf.metric_table(name))


# ----------------------------------------------------------------------------------------------------- SkyRL


@st.composite
def skyrl_settings(draw: Callable) -> dict:
    keys: dict = {
        "tis_ratio_type": draw(st.sampled_from([None, "token", "sequence"])),
        "sequence_mask_metric": draw(st.sampled_from([None, "geometric", "product"])),
    }
    if draw(st.booleans()):
        keys |= {"token_mask_is_threshold_low": draw(st.floats(0.3, 0.95)), "token_mask_is_threshold_high": 1.1}
    keys["outlier_token_is_threshold_low"] = draw(st.none() | st.floats(0.3, 0.9))
    keys["outlier_token_is_threshold_high"] = draw(st.none() | st.floats(1.1, 3.0))
    return keys


@given(batch=rows(dead=True), chosen=skyrl_settings())
def test_skyrl_settings(batch: Rows, chosen: dict):
    config = skyrl.settings(**chosen)
    correction = clear_answer(batch, skyrl.mapping_of(config))
    weights, mask, _ = skyrl.correction(batch, config)
    assert_same_weights(batch, correction, weights, mask)


@given(batch=rows(), chosen=skyrl_settings())
def test_skyrl_loss(batch: Rows, chosen: dict):
    config = skyrl.settings(**chosen)
    target, tokens = token_losses(batch, clear_answer(batch, skyrl.mapping_of(config)))
    assert_same_loss(batch, lambda x: skyrl.loss(batch, x, config), target, tokens)


SKYRL_MASKS = [
    {"tis_ratio_type": "token"},
    {"tis_ratio_type": "sequence"},
    {"sequence_mask_metric": "geometric"},
    {"sequence_mask_metric": "product"},
    {"token_mask_is_threshold_low": 0.9, "token_mask_is_threshold_high": 1.1},
    {"outlier_token_is_threshold_low": 0.5, "outlier_token_is_threshold_high": 2.0},
]


@few
@given(batch=rows(), chosen=st.sampled_from(SKYRL_MASKS))
def test_skyrl_metrics(batch: Rows, chosen: dict):
    config = skyrl.settings(**chosen)
    mapping = skyrl.mapping_of(config)
    keep_away(batch, mapping)
    _, _, theirs = skyrl.correction(batch, config)
    assume(batch.mask.numel() > 1)  # of one number it has no deviation
    table = skyrl.metric_table(config, batch.mask.numel())
    assert set(theirs) == set(table)
    assert_same_metrics(batch, our_metrics(batch, mapping), theirs, table)


# ------------------------------------------------------------------------------------------- names of metrics

VERL_OPTIONS = {"rollout_rs": ",".join(OPTIONS), "rollout_rs_threshold": ",".join("1.5" for _ in OPTIONS)}


def metric_tables() -> Iterator[tuple[str, Mapping[str, Metric]]]:
    """Everything that was compared above, under the names that the peers' logs have."""
    for level in ("token", "sequence"):
        yield ("verl", verl.metric_table({"rollout_is": level, "rollout_is_threshold": "0.5_2.0"} | VERL_OPTIONS))
    yield "verl", verl.PROBABILITIES
    for mode in ms_swift.MODES:
        table = ms_swift.MISMATCH | ms_swift.weight_table(mode)
        yield "ms-swift", {f"rollout_correction/{name}": metric for name, metric in table.items()}
    yield from (("TRL", trl.metric_table(mode)) for mode in trl.MODES)
    yield from (("AReaL", areal.metric_table(areal.settings(action=action))) for action in ("mask", "clamp"))
    yield from (("OpenRLHF", openrlhf.metric_table(name)) for name in openrlhf.PRESETS)
    yield from (("SkyRL", skyrl.metric_table(skyrl.settings(**chosen), cells=2)) for chosen in SKYRL_MASKS)


def test_every_metric_is_listed_under_its_own_name():
    """In docs/metrics.md: the names of ours beside theirs, or in its last table."""
    for peer, table in metric_tables():
        elsewhere = OTHERWISE.get(peer, {})
        for name, metric in table.items():
            listed = {ours for theirs, ours in PEERS[peer].items() if is_named(name, theirs)}
            words = " ".join(f"{theirs}: {ours}" for theirs, ours in elsewhere.items())
            assert listed or name in words, (peer, name)
            ours = re.sub(r"rule_\d+", "rule_{i}", metric) if isinstance(metric, str) else None
            assert ours is None or ours in listed or ours in words, (peer, name, metric)


@pytest.fixture(scope="module")
def logged_by_verl() -> set[str]:
    """Every name that the installed verl logs of its correction, over its levels and rules."""
    of_rules = VERL_OPTIONS | {
        "rollout_rs_threshold": ",".join("0.5_1.5" if x.endswith("k1") else "1.5" for x in OPTIONS)
    }
    batch = fixed_rows([[0.3] * 3, [0.3] * 2])
    settings = [
        {"rollout_is": level, "rollout_is_threshold": bound, "rollout_is_batch_normalize": normalize} | rules
        for level in (None, "token", "sequence")
        for bound in (2.0, "0.5_2.0")
        for normalize in (False, True)
        for rules in ({}, of_rules)
    ]
    return {name for chosen in settings for name in verl.correction(batch, chosen)[2]}


def test_verl_names_are_those_that_it_logs(logged_by_verl: set[str]):
    """None is missing in the table of names, and none stands there that it does not log."""
    listed = [name for name in PEERS["verl"] if name.startswith("rollout_corr/")]
    words = " ".join(OTHERWISE["verl"])
    assert {x for x in logged_by_verl if not any(is_named(x, name) for name in listed) and x not in words} == set()
    assert {name for name in listed if not any(is_named(x, name) for x in logged_by_verl)} == set()


def test_verl_mismatch_names_are_of_an_earlier_release(logged_by_verl: set[str]):
    """verl 0.9.1 writes none of them; each means what its successor means, but where the table says otherwise."""
    assert not any(name.startswith("mismatch/") for name in logged_by_verl)
    assert not [path for path in verl.sources() if '"mismatch/' in path.read_text(encoding="utf-8")]
    before = {name for name in PEERS["verl"] if name.startswith("mismatch/")}
    same = {name: f"rollout_corr/{re.sub('^mismatch/(mismatch_)?', '', name)}" for name in before}
    # Before the bound, where verl 0.9.1 reports weights after it; or of names that it has no more.
    other = {
        f"mismatch/rollout_is_{name}"
        for name in ("mean", "max", "min", "masked_fraction", "veto_fraction", "p{percent}")
    }
    assert {name for name in before if PEERS["verl"].get(same[name]) != PEERS["verl"][name]} == other
    assert "rollout_is_* is taken before the bound" in OTHERWISE["verl"]["mismatch/*"]


def is_named(name: str, template: str) -> bool:
    return re.fullmatch(re.sub(r"\\{\w+\\}", r"\\w+", re.escape(template)), name) is not None


# ----------------------------------------------------------------------- other objectives, on the same weights

DUAL = 1.5


@pytest.mark.parametrize(
    ("name", "objective", "level"),
    [("gspo", GSPO, "sequence"), ("cispo", CISPO, "sequence"), ("cispo", CISPO, "token")],
)
@few
@given(batch=rows())
def test_verl_other_losses(name: str, objective: dict, level: str, batch: Rows):
    """GSPO by weights of sequences; of tokens see `test_sequence_ratio_gradient_differs`."""
    weights = {"rollout_is": level, "rollout_is_threshold": 1.2}
    correction = weighs_something(batch, verl.mapping_of(weights), batch.batch.proximal)
    target, tokens = token_losses(batch, correction, objective)
    theirs = lambda x: verl.surrogate_loss(batch, x, weights, name, "token-sum", DUAL_CLIP)  # noqa: E731
    assert_same_loss(batch, theirs, target, tokens)


def divergence_of(old: Tensor, target: Tensor, kind: str) -> Tensor:
    """The total variation or the KL of the sampled token against all others, in float64."""
    mu, pi = old.exp(), target.exp()
    kl = mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()
    return (pi - mu).abs() if kind == "tv" else kl


def clear_of_dppo(batch: Rows, old: Tensor, kind: str) -> None:
    """No token's divergence lies within rounding of a width of `CLIP`, and no probability where peers clamp."""
    mu, pi = old.exp(), batch.pad(batch.target).exp()
    valid = batch.mask.bool()
    assume(bool(((mu < 1 - 1e-3) & (mu > 1e-5) & (pi < 1 - 1e-3) & (pi > 1e-5))[valid].all()))
    divergence = divergence_of(old, batch.pad(batch.target), kind)
    assume(all(((divergence - width).abs() > DECISION)[valid].all() for width in (CLIP.low, CLIP.high)))


@pytest.mark.parametrize("kind", ["tv", "kl"])
@few
@given(batch=rows(), cap=st.sampled_from([None, 1.2]))
def test_trl_dppo(kind: str, batch: Rows, cap: float | None):
    """Mask, loss and gradient. TRL compares with the rollout engine, and its loss is a mean over tokens."""
    clear_of_dppo(batch, batch.behavior, kind)
    objective, clip = {"surrogate": f"dppo_{kind}", "old": "behavior"}, replace(CLIP, dual=cap)
    target, tokens = plain_losses(batch, objective, clip)
    held = torch.where(batch.mask.bool(), trl.dppo_mask(batch, f"binary_{kind}", clip), 0)
    (gradient,) = torch.autograd.grad(tokens.sum(), target, retain_graph=True)
    assert torch.equal(gradient != 0, held.bool())
    theirs = lambda x: trl.dppo_loss(batch, x, f"binary_{kind}", clip)  # noqa: E731
    assert_same_loss(batch, theirs, target, tokens / batch.mask.sum())


@pytest.mark.parametrize("clip", [Clip(0.15, 0.15), Clip(0.05, 0.05), Clip(0.02, 0.1), Clip(0.1, 0.02)], ids=str)
@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_trl_dppo_mask(kind: str, clip: Clip):
    """The mask of 2,000 tokens, most of them probable: at both widths that TRL advises, and where low is not high."""
    torch.manual_seed(0)
    behavior = torch.empty(40, 50).uniform_(0.02, 0.95).log()
    target = (behavior + 0.5 * torch.randn(40, 50)).clamp(max=-1e-2)
    batch = make_batch([(row, row, [1] * 50) for row in behavior.tolist()])
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64).repeat(8)
    both = Rows(batch, list(target), advantages)
    old, new = torch.cat(batch.behavior), target.flatten()
    each = advantages.repeat_interleave(50).float()
    config = from_mapping(preset(f"dppo-{kind}")).objective
    assert config is not None
    term = policy_term(new, old, each, torch.ones(2000), both.ragged, config, clip)
    held = trl.dppo_mask(both, f"binary_{kind}", clip).flatten().bool()
    away = divergence_of(both.behavior, both.pad(both.target), kind).flatten()
    clear = ((away - clip.low).abs() > DECISION) & ((away - clip.high).abs() > DECISION)
    assert torch.equal((term.clipped == 0)[clear], held[clear]) and clear.sum() > 1990
    for sign in (-1, 1):
        assert 20 < (~held & (sign * each > 0)).sum() < 700  # neither side of the mask is empty, nor all of it


def test_trl_dppo_defaults_are_those_of_the_preset():
    """The preset's own lines name the flags; of the KL divergence TRL's help says 0.05."""
    config = trl.load(trl.DPPO).DPPOConfig
    wanted = {"divergence_type": "binary_tv", "epsilon": 0.15, "epsilon_high": 0.15, "clip_ratio_c": DPPO_CAP}
    assert wanted.items() <= defaults(config).items()
    recommended = "0.15 for TV divergence and 0.05 for KL"
    assert recommended in " ".join((inspect.getdoc(config) or "").split())
    for kind, width in (("tv", 0.15), ("kl", 0.05)):
        flags = f"--eps-clip {width} --eps-clip-high {width} --eps-clip-c {DPPO_CAP:g}"
        assert flags in preset_path(f"dppo-{kind}").read_text()


@pytest.mark.parametrize("kind", ["tv", "kl"])
@few
@given(batch=rows())
def test_verl_dppo(kind: str, batch: Rows):
    """Against the proximal policy, multiplied by the weights of the rollout correction."""
    clear_of_dppo(batch, batch.proximal, kind)
    weights = {"rollout_is": "token", "rollout_is_threshold": 1.2}
    correction = weighs_something(batch, verl.mapping_of(weights), batch.batch.proximal)
    target, tokens = token_losses(batch, correction, {"surrogate": f"dppo_{kind}"}, DUAL_CLIP)
    theirs = lambda x: verl.surrogate_loss(batch, x, weights, f"dppo_{kind}", "token-sum", DUAL_CLIP)  # noqa: E731
    assert_same_loss(batch, theirs, target, tokens)


@pytest.mark.parametrize("kind", ["tv", "kl"])
@few
@given(batch=rows())
def test_skyrl_dppo(kind: str, batch: Rows):
    """SkyRL reports the ratio itself as the loss, whose gradient is that of the ratio as a constant factor."""
    clear_of_dppo(batch, batch.behavior, kind)
    objective = {"surrogate": f"dppo_{kind}", "old": "behavior"}
    target, tokens = plain_losses(batch, objective, Clip(0.2, 0.28, 1e9))
    assert_same_gradient(batch, lambda x: skyrl.dppo_loss(batch, x, f"binary_{kind}", CLIP), target, tokens)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_masks_the_tokens_that_verl_and_skyrl_mask(kind: str):
    """Four moves of a probability of 0.135, far and near, up and down, once with each sign of the advantage."""
    batch, narrow = fixed_rows([[0.0] * 4, [0.0] * 4]), Clip(0.01, 0.02, 3.0)
    moves = torch.tensor([0.6, -0.6, 0.01, -0.01])
    batch = replace(
        batch,
        target=[old.float() + moves for old in batch.batch.proximal],
        advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
    )
    masked = [[True, False, False, False], [False, True, False, False]]
    for old, judge in (
        ("proximal", lambda x: verl.surrogate_loss(batch, x, {}, f"dppo_{kind}", "token-sum", narrow)),
        ("behavior", lambda x: skyrl.dppo_loss(batch, x, f"binary_{kind}", narrow)),
    ):
        objective = {"surrogate": f"dppo_{kind}", "old": old}
        mine, theirs = assert_same_gradient(batch, judge, *plain_losses(batch, objective, narrow))
        assert (mine == 0).tolist() == (theirs == 0).tolist() == masked


TAUS = st.sampled_from([{"tau_pos": 1.0, "tau_neg": 1.05}, {"tau_pos": 0.5, "tau_neg": 3.0}])


@pytest.mark.parametrize("level", ["token", "sequence"])
@few
@given(batch=rows(), taus=TAUS)
def test_sapo(level: str, batch: Rows, taus: dict):
    """TRL's and ms-swift's, of tokens and sequences, and AReaL's, which compares with the rollout engine."""
    trls = {f"sapo_temperature_{name[4:]}": value for name, value in taus.items()}
    ratio: dict[str, Any] = {"importance_sampling_level": level}
    judges: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("proximal", lambda x: trl.loss(batch, x, None, loss_type="sapo", args=SimpleNamespace(**trls), **ratio)),
        ("proximal", lambda x: ms_swift.loss(batch, x, loss_type="sapo", **taus, **ratio)),
        ("behavior", lambda x: areal.sapo_loss(batch, x, batch.behavior, level, **taus)),
    ]
    for old, theirs in judges:
        objective = {"surrogate": "sapo", "old": old, "ratio": level} | taus
        target, tokens = plain_losses(batch, objective)
        mean = mean_of_means(batch, tokens) if old == "proximal" else tokens / batch.mask.sum()
        assert_same_loss(batch, theirs, target, mean)


@few
@given(batch=rows(), taus=TAUS)
def test_verl_and_skyrl_sapo(batch: Rows, taus: dict):
    """verl's with the weights of its rollout correction."""
    weights = {"rollout_is": "token", "rollout_is_threshold": 1.2}
    correction = weighs_something(batch, verl.mapping_of(weights), batch.batch.proximal)
    target, tokens = token_losses(batch, correction, {"surrogate": "sapo"} | taus)
    theirs = lambda x: verl.surrogate_loss(batch, x, weights, "sapo", "token-sum", DUAL_CLIP, **taus)  # noqa: E731
    assert_same_loss(batch, theirs, target, mean_of_means(batch, tokens))
    target, tokens = plain_losses(batch, {"surrogate": "sapo"} | taus)
    assert_same_loss(batch, lambda x: skyrl.sapo_loss(batch, x, **taus), target, tokens)


@few
@given(batch=rows())
def test_trl_vespo(batch: Rows):
    """Against pi_old; with TRL's ratio of tokens, of which the cap does not act, against mu."""
    uncapped, _ = trl.correction(batch, "token_truncate", 1e9)
    for old, ratio in (("proximal", None), ("behavior", uncapped)):
        objective = {"surrogate": "vespo", "old": old}
        target, tokens = plain_losses(batch, objective)
        theirs = lambda x, ratio=ratio: trl.loss(batch, x, ratio, loss_type="vespo")  # noqa: E731
        assert_same_loss(batch, theirs, target, tokens / batch.mask.sum())


@few
@given(batch=rows())
def test_trl_and_verl_gmpo(batch: Rows):
    keep_off_the_clip(batch)
    target, tokens = plain_losses(batch, {"surrogate": "gmpo"})
    mean = mean_of_means(batch, tokens)
    assert_same_loss(batch, lambda x: trl.gmpo_loss(batch, x, CLIP), target, mean)
    theirs = lambda x: verl.surrogate_loss(batch, x, {}, "geo_mean", "token-mean", DUAL_CLIP)  # noqa: E731
    assert_same_loss(batch, theirs, target, mean)


def keep_off_the_clip(batch: Rows) -> None:
    """Skip a batch with a log ratio at a width of `CLIP`, where the gradient has no value."""
    log_ratio = (batch.pad(batch.target) - batch.proximal)[batch.mask.bool()]
    assume(all(bool(((log_ratio - x).abs() > DECISION).all()) for x in (-CLIP.low, CLIP.high)))


def test_the_defaults_of_soft_objectives_are_those_of_their_owners():
    sapo, vespo = (SURROGATES[name].settings for name in ("sapo", "vespo"))
    trls, verls, areals = trl.grpo_defaults(), verl.actor_defaults(), areal.actor_defaults()
    assert vespo == {name: trls[f"vespo_{name}"] for name in vespo}
    assert sapo == {f"tau_{sign}": trls[f"sapo_temperature_{sign}"] for sign in ("pos", "neg")}
    assert sapo == {name: verls[name] for name in sapo} == {name: areals[f"sapo_{name}"] for name in sapo}
    width = defaults(trl.load(trl.GMPO).GMPOConfig)["epsilon"]
    for text in (preset_path("gmpo").read_text(), " ".join(from_trl.translate("GMPOConfig()").notes)):
        assert f"--eps-clip {width} --eps-clip-high {width}" in text


@few
@given(batch=rows(max_responses=5), weigh=st.booleans(), seed=st.integers(0, 99))
def test_verl_token_baseline(batch: Rows, weigh: bool, seed: int):
    """Over turns, with and without importance weights, of squares that leave each token a gradient."""
    torch.manual_seed(seed)
    rewards, others = (torch.rand_like(batch.mask) for _ in range(2))
    squares = batch.proximal.exp().square() + others + 0.01
    groups = [i % 2 for i in range(len(batch.mask))]
    weights = batch.log_ratio.exp() if weigh else None
    theirs = verl.token_advantages(batch, rewards, squares, groups, weights)
    flat, numbered = batch.flat, torch.tensor(groups)
    flat_weights = None if weights is None else flat(weights)
    own = token_advantages(flat(rewards), flat(batch.proximal), flat(squares), batch.ragged, numbered, flat_weights)
    assert_all_close(batch.padded(own), theirs, 1e-9, "advantage", atol=1e-9)


def distinct_squares(batch: Rows) -> bool:
    squares = batch.log_ratio.square()[batch.mask.bool()]
    return squares.unique().numel() == squares.numel()


@given(batch=rows(dead=True), threshold=st.sampled_from([1e-4, 0.01, 0.04, 0.3]))
def test_areal_m2po(batch: Rows, threshold: float):
    """Some token stays, and no two squares are equal: elsewhere see `test_areal_m2po_keeps_one_token`."""
    assume(distinct_squares(batch))
    expected = oracle.correct(batch.batch.samples, {"m2_threshold": threshold})
    assume(expected.margin > DECISION and any(map(any, expected.keep)))
    correction = ours(batch, {"weight": None, "m2_threshold": threshold})
    assert torch.equal(batch.padded(correction.keep).bool(), areal.m2po_mask(batch, threshold))


@few
@given(batch=rows(), level=st.sampled_from(["token", "sequence"]), action=st.sampled_from(["mask", "clamp"]))
def test_areal_m2po_comes_before_rejection(batch: Rows, level: str, action: str):
    """AReaL's rejection adds up the tokens that M2PO leaves, and so does what `from-areal` writes of its file."""
    block = {"level": level, "action": action, "upper": 1.2}
    text = yaml.safe_dump({"actor": {"m2_threshold": 0.04, "rejection_sampling": block}})
    mapping = {"reject": []} | dict(from_areal.translate(text).mis)
    left = areal.m2po_mask(batch, 0.04)
    masks = [row[:n] for row, n in zip(left.int(), batch.batch.response_lengths, strict=True)]
    narrowed = replace(batch, batch=replace(batch.batch, loss_masks=masks))
    expected = oracle.correct(batch.batch.samples, mapping)
    assume(distinct_squares(batch) and expected.margin > DECISION and any(map(any, expected.keep)))
    weights, mask, _ = areal.correction(narrowed, areal.settings(**block))
    assert_same_weights(batch, ours(batch, mapping), weights, mask)


@few
@given(batch=rows())
def test_dual_clip(batch: Rows):
    """AReaL's, OpenRLHF's and SkyRL's; verl's is part of its presets."""
    target, tokens = plain_losses(batch, {}, Clip(0.2, 0.28, DUAL))
    mean = tokens / batch.mask.sum()
    assert_same_loss(batch, lambda x: areal.loss(batch, x, None, c_clip=DUAL)[0], target, mean)
    off: dict[str, Any] = {"is_correction_level": "off", "dual_clip": DUAL}
    assert_same_loss(batch, lambda x: openrlhf.loss(batch, x, openrlhf.BOUNDS, **off)[0], target, mean)
    assert_same_loss(batch, lambda x: skyrl.loss(batch, x, skyrl.settings(), DUAL), target, tokens)


@few
@given(batch=rows())
def test_sequence_ratio(batch: Rows):
    """GSPO as AReaL and OpenRLHF have it, the latter with the behavior policy as old once it corrects."""
    target, tokens = plain_losses(batch, GSPO)
    level = {"importance_sampling_level": "sequence"}
    assert_same_loss(batch, lambda x: areal.loss(batch, x, None, **level)[0], target, tokens / batch.mask.sum())
    target, tokens = plain_losses(batch, GSPO | {"old": "behavior"})
    gspo: dict[str, Any] = {"policy_loss_type": "gspo", "is_correction_level": "token"}
    theirs = lambda x: openrlhf.loss(batch, x, openrlhf.BOUNDS, **gspo)[0]  # noqa: E731
    assert_same_loss(batch, theirs, target, mean_of_means(batch, tokens))


def test_hostile_batches_find_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch):
    """A short round of the campaign, without mis.py, which no index has; each package's formula is its code's."""
    monkeypatch.delitem(hostile.PACKAGES, "Miles's mis.py")
    counts = hostile.told_apart(tried("peers", 0, 40))
    assert {found for name, _, found in counts if name == hostile.OURS} <= {"right", "unclear"}
    assert not [key for key in counts if key[1:] == ("plain", "wrong")]
