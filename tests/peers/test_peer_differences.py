"""Where another package's answer is not ours: its answer, ours, and why. docs/peers.md lists them under the same names.

Runs under `bash scripts/peers.sh`. D1 to D18 are the numbers of that list.
"""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from batches import make_batch
from peers import areal, ms_swift, openrlhf, skyrl, trl, verl
from peers.rows import Rows, fixed_rows, our_metrics, ours, preset, surrogate_loss
from tolerances import WRITTEN

from mis_plugins.config.model import OpsmConfig
from mis_plugins.config.reading import from_mapping
from mis_plugins.correction.opsm import on_policy
from mis_plugins.errors import ConfigError
from mis_plugins.explain.translate import verl as from_verl
from mis_plugins.loss.objective import Clip

DOCUMENT = Path(__file__).parents[2] / "docs" / "peers.md"


def test_document_lists_these():
    listed = set(re.findall(r"`(test_\w+)`", DOCUMENT.read_text()))
    here = {name for name in globals() if name.startswith("test_")} - {"test_document_lists_these"}
    assert here <= listed
    assert listed - here == {"test_trl_loss", "test_ms_swift_loss"}


def close(found: float, expected: float) -> None:
    """Of numbers that a test writes down."""
    assert found == pytest.approx(expected, rel=WRITTEN)


def weights_of(batch: Rows, weight: dict, **more: Any) -> list[float]:
    return batch.padded(ours(batch, {"weight": weight, **more}).weights)[0].tolist()


def test_chi2_sequence_differs():
    """D1. verl means products, ms-swift geometric means, under one name. We have both, under two."""
    batch = fixed_rows([[0.1] * 20, [-0.05] * 20])
    theirs = (verl.correction(batch, {})[2]["rollout_corr/chi2_seq"], ms_swift.mismatch_metrics(batch)["chi2_seq"])
    assert (round(theirs[0], 1), round(theirs[1], 4)) == (26.4, 0.0631)
    found = our_metrics(batch, {"weight": None})
    close(found["chi2_sequence"], theirs[0])
    close(found["chi2_geometric"], theirs[1])


def test_sequence_ratio_differs():
    """D2. `sequence` is the product in verl and TRL, the geometric mean in ms-swift and AReaL."""
    batch = fixed_rows([[0.2, 0.3, 0.1]])
    areal_clamp = areal.settings(level="sequence", action="clamp")
    products = verl.correction(batch, {"rollout_is": "sequence", "rollout_is_threshold": 9.0})[0][0, 0].item(), \
        trl.correction(batch, "sequence_truncate")[0].item()  # fmt: skip
    means = ms_swift.weights(batch, "sequence_truncate", 9.0)[0, 0].item(), \
        areal.correction(batch, areal_clamp)[0][0, 0].item()  # fmt: skip
    for level, values, expected in (("sequence", products, 0.6), ("geometric", means, 0.2)):
        found = weights_of(batch, {"level": level, "upper": 9.0})[0]
        for value in (found, *values):
            close(value, math.exp(expected))


def test_weight_of_a_kept_sequence_differs():
    """D3. What `sequence_mask` multiplies a kept token by: the product in TRL, its own ratio in ms-swift and OpenRLHF.

    ms-swift's document has the sequence's ratio there (`ms-swift-sequence-mask-as-documented`); its code does not.
    """
    batch = fixed_rows([[0.2, 0.4]])
    target = batch.pad(batch.target).requires_grad_()
    loss = openrlhf.loss(batch, target, openrlhf.BOUNDS, **openrlhf.PRESETS["seq-mask-tis"])[0]
    coefficients = -2 * torch.autograd.grad(loss, target)[0][0]  # of the mean over two tokens
    close(trl.correction(batch, "sequence_mask")[0].item(), math.exp(0.6))
    for theirs in (ms_swift.weights(batch, "sequence_mask", 2.0)[0], coefficients):
        assert theirs.tolist() == pytest.approx([math.exp(0.2), math.exp(0.4)], rel=WRITTEN)
    found = batch.padded(ours(batch, preset("ms-swift-sequence-mask-as-documented")).weights)[0]
    assert found.tolist() == pytest.approx([math.exp(0.3)] * 2, rel=WRITTEN)


def test_verl_k1_bounds_differ():
    """D4. verl's "0.6_1.4" bounds mu / pi_old: it keeps r = 1.5 and drops r = 0.65. Our bounds are on r itself."""
    batch = fixed_rows([[math.log(1.5), math.log(0.65)]])
    _, mask, _ = verl.correction(batch, {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4"})
    assert mask.tolist() == [[1, 0]]
    assert ours(batch, token_rule(lower=0.6, upper=1.4)).keep.tolist() == [False, True]
    assert ours(batch, token_rule(lower=1 / 1.4, upper=1 / 0.6)).keep.tolist() == [True, False]


def token_rule(**rule: Any) -> dict:
    return {"weight": None, "reject": [{"over": "token", **rule}]}


def test_areal_k1_differs():
    """D4. AReaL's k1 is log r, ours and Schulman's -log r of samples of mu."""
    batch = fixed_rows([[0.5, -0.5]])
    _, mask, _ = areal.correction(batch, areal.settings(metric="kl_k1", upper=0.3))
    assert mask.tolist() == [[0, 1]]
    assert ours(batch, token_rule(statistic="k1", upper=0.3)).keep.tolist() == [True, False]


def test_areal_k3_differs():
    """AReaL's k3 is 1/r - 1 + log r, where its own help says r - log r - 1: of r = e it finds 0.37 and not 0.72.

    1/r - 1 + log r estimates KL(pi_old || mu) from samples of pi_old; the samples are mu's. Ours is the documented one.
    """
    high, low = fixed_rows([[1.0]]), fixed_rows([[-1.0]])
    config = areal.settings(metric="kl_k3", upper=0.5)
    assert [areal.correction(x, config)[1].item() for x in (high, low)] == [True, False]
    rule = token_rule(statistic="k3", upper=0.5)
    assert [ours(x, rule).keep.item() for x in (high, low)] == [False, True]
    assert "r - log(r) - 1" in areal.said_of("metric")["help"]


def test_areal_clamp_by_the_largest_ratio_differs():
    """AReaL's clamp of a sequence by `agg: max` leaves a weight below `lower`, if no token's ratio is above `upper`.

    Two sequences of weight 0.2: that with an outlier of 8 is lifted to 0.5, that without stays. Its help promises to
    clamp the weight to [lower, upper]: our `clip` does. Without a lower bound both are min(weight, upper).
    """
    batch = fixed_rows([[math.log(1.0), math.log(0.04)], [math.log(8.0), math.log(0.005)]])
    config = areal.settings(level="sequence", action="clamp", agg="max", lower=0.5, upper=5.0)
    for packed in (False, True):
        weights, mask, _ = areal.correction(batch, config, packed)
        assert weights.flatten().tolist() == pytest.approx([0.2, 0.2, 0.5, 0.5], rel=WRITTEN)
        assert mask.all()
    clamp = {"level": "geometric", "bound": "clip", "lower": 0.5, "upper": 5.0}
    assert ours(batch, {"weight": clamp}).weights.tolist() == [0.5] * 4
    assert "clamp importance weight to [lower, upper] bounds" in areal.said_of("action")["help"]


def test_areal_default_differs():
    """AReaL weighs by nothing unless `rejection_sampling` is set, decoupled loss or not; `tis` weighs at once."""
    batch = fixed_rows([[1.0]])
    target = batch.pad(batch.target)
    off, on = (areal.loss(batch, target, config)[0].item() for config in (None, areal.settings()))
    close(off, -1.0)
    close(on, -math.e)
    close(weights_of(batch, {"upper": 5.0})[0], math.e)


def test_veto_differs():
    """D5. SkyRL's outliers are ratios, on either side. Miles's blog vetoes a probability, which it cannot see."""
    settings = skyrl.settings(outlier_token_is_threshold_low=1e-4, outlier_token_is_threshold_high=100.0)
    ratios = fixed_rows([[0.0, 5.0], [0.0, -10.0], [0.0, 1.0]])
    assert skyrl.correction(ratios, settings)[1].tolist() == [[0, 0], [0, 0], [1, 1]]
    assert ours(ratios, skyrl.mapping_of(settings)).keep.tolist() == [False] * 4 + [True] * 2
    unlikely = Rows(make_batch([([-1.0, -15.0], [-1.0, -15.0], [1, 1])]), [], torch.zeros(1))  # p = 3e-7 under both
    assert skyrl.correction(unlikely, settings)[1].tolist() == [[1, 1]]
    blog = {"statistic": "proximal_prob", "over": "min", "lower": 1e-6}
    assert ours(unlikely, {"weight": None, "reject": [blog]}).keep.tolist() == [False, False]


def test_mask_differs():
    """D6. `mask` sets the weight to 0 and leaves the loss mask in verl, TRL and OpenRLHF; AReaL drops the token.

    Ours are `zero` and `mask`; they differ where the host divides by the tokens that are left.
    """
    batch = fixed_rows([[0.0, 2.0]])
    for weights in (
        verl.correction(batch, {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"})[0],
        trl.correction(batch, "token_mask")[0],
    ):
        assert weights.tolist() == [[1, 0]]
    zero, mask = ({"level": "token", "bound": x, "lower": 0.5, "upper": 5.0} for x in ("zero", "mask"))
    assert ours(batch, {"weight": zero}).keep.tolist() == [True, True]
    assert areal.correction(batch, areal.settings())[1].tolist() == [[1, 0]]
    assert ours(batch, {"weight": mask}).keep.tolist() == [True, False]


def test_denominator_differs():
    """D7. After rejection verl's loss alone divides by the tokens that are left, AReaL by those that were valid.

    `denominator: kept` and `original`. verl's trainers hand their loss two counts: of all responses, and of the tokens
    that were valid before rejection, but for `use_v1: false` without bypass. `config from-verl` follows the trainers.
    """
    batch = fixed_rows([[0.0, 2.0], [2.0, 2.0]])
    target = batch.pad(batch.target)
    rule = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    counts = {"dp_size": 1, "batch_num_tokens": 4, "global_batch_size": 2}
    for handed, by_token, by_response in (({}, -1.0, -1.0), (counts, -1 / 4, -1 / 2)):
        for mode, expected in (("token-mean", by_token), ("seq-mean-token-mean", by_response)):
            close(verl.decoupled_loss(batch, target, rule, mode, global_batch_info=handed).item(), expected)
    close(areal.loss(batch, target, areal.settings())[0].item(), -1 / 4)
    by_mode = {
        mode: from_verl.translate(yaml.safe_dump(rule), [f"{from_verl.AGGREGATED}={mode}"]).mis.get("denominator")
        for mode in ("token-mean", "seq-mean-token-mean")
    }
    assert by_mode == {"token-mean": None, "seq-mean-token-mean": "kept"}
    kept = ours(batch, token_rule(lower=0.5, upper=2.0) | {"denominator": "kept"})
    assert kept.rescale is not None
    assert kept.rescale.tolist() == [2, 0]


def test_normalization_counts_zeros():
    """D8. A zeroed weight enters verl's mean and that of our `zero`; a token that `mask` drops enters neither."""
    batch = fixed_rows([[0.2, 2.0]])
    keys = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", "rollout_is_batch_normalize": True}
    close(verl.correction(batch, keys)[0][0, 0].item(), 2.0)
    bounds = {"lower": 0.5, "upper": 5.0, "normalize": {}}
    close(weights_of(batch, {"bound": "zero", **bounds})[0], 2.0)
    close(weights_of(batch, {"bound": "mask", **bounds})[0], 1.0)


def test_effective_sample_size_differs():
    """D9. ms-swift lifts what it zeroed to 1 / threshold before it measures: 0.90 where verl says 0.50."""
    batch = fixed_rows([[0.0, 2.0]])
    theirs = verl.correction(batch, {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"})[2]
    lifted = ms_swift.weight_metrics(batch, "token_mask", 2.0)["ess"]
    assert round(theirs["rollout_corr/rollout_is_eff_sample_size"], 6) == 0.5
    assert round(lifted, 6) == 0.9
    found = our_metrics(batch, preset("ms-swift-token-mask"))
    close(found["ess"], 0.5)
    close(found["ess_lifted"], 0.9)


def test_off_policy_advantage_differs():
    """D11. Given an advantage a token, TRL drops single tokens, ms-swift the sequence by its mean advantage."""
    batch = fixed_rows([[-1.0, -1.0]])
    advantages = torch.tensor([[1.0, -3.0]], dtype=torch.float64)
    per_token = trl.trainer_class().get_off_policy_mask(
        advantages, batch.pad(batch.target), batch.behavior, batch.mask, 0.1
    )
    assert per_token.tolist() == [[1, 0]]
    assert ms_swift.off_policy_mask(replace(batch, advantages=advantages.mean(-1)), 0.1).tolist() == [False]
    flat = (batch.packed(x) for x in (batch.pad(batch.target), batch.behavior, advantages))
    target, mu, token_advantages = flat
    for choice, expected in (("token", [True, False]), ("sequence", [False, False])):
        config = OpsmConfig(0.1, choice)  # type: ignore[arg-type]
        assert on_policy(target, mu, token_advantages, batch.ragged, config).tolist() == expected


def test_kl_weight_differs():
    """D12. ms-swift weighs the KL term too, TRL the policy term alone: `weigh_kl`."""
    batch = fixed_rows([[1.0]])
    target, reference = batch.pad(batch.target), batch.proximal - 1.0
    ratio, _ = trl.correction(batch, "token_truncate")
    kl, weight = math.exp(-1.0), math.e
    close(trl.loss(batch, target, ratio, reference, beta=1.0).item(), -weight + kl)
    swift = ms_swift.loss(
        batch, target, reference, beta=1.0, rollout_importance_sampling_mode="token_truncate",
        rollout_importance_sampling_threshold=3.0,
    )  # fmt: skip
    close(swift.item(), weight * (-1 + kl))


def test_overflow_differs():
    """D13. Of log r = 100: verl's and our weight is e^20, TRL's e^100. verl's k3 is e^100, ms-swift's 10, ours e^20."""
    batch = fixed_rows([[100.0]])
    unbounded = {"rollout_is": "token", "rollout_is_threshold": 1e300}
    close(verl.correction(batch, unbounded)[0].item(), math.exp(20))
    close(weights_of(batch, {"bound": "none"})[0], math.exp(20))
    close(trl.correction(batch, "token_mask", None)[0].item(), math.exp(100))
    close(verl.correction(batch, {})[2]["rollout_corr/k3_kl"], math.exp(100) - 101)
    close(ms_swift.mismatch_metrics(batch)["k3_kl"], 10.0)
    close(our_metrics(batch, {"weight": None})["kl_k3"], math.exp(20) - 21)


def test_missing_log_prob_differs():
    """D13. A rollout log-prob that is NaN: TRL's and AReaL's weight is 1, as if the policies agreed; ours is 0.

    Nothing is known of such a token, so nothing may be learned from it; the sample filter names its sample.
    """
    batch = fixed_rows([[0.5, 0.5]])
    batch.batch.behavior[0][0] = math.nan
    assert trl.correction(batch, "token_truncate")[0][0, 0].item() == 1.0
    assert areal.correction(batch, areal.settings())[0][0, 0].item() == 1.0
    assert weights_of(batch, {"level": "token"})[0] == 0.0
    mask = trl.trainer_class().get_off_policy_mask
    assert mask(-torch.ones(1, 1), batch.proximal - 0.1, batch.behavior, batch.mask, 1.0).item() == 1
    config, minus = OpsmConfig(1.0), -torch.ones(2)
    log_probs = batch.packed(batch.proximal), batch.packed(batch.behavior)
    assert on_policy(*log_probs, minus, batch.ragged, config).tolist() == [False, False]


def test_lower_bound_differs():
    """D14. OpenRLHF's `tis` raises small weights to 0.5, our `clip`; verl leaves them, our `truncate`."""
    batch = fixed_rows([[-3.0]])
    target = batch.pad(batch.target)
    close(openrlhf.loss(batch, target, openrlhf.BOUNDS, **openrlhf.PRESETS["tis"])[0].item(), -0.5)
    close(weights_of(batch, preset("openrlhf-tis")["weight"])[0], 0.5)
    close(verl.correction(batch, {"rollout_is": "token"})[0].item(), math.exp(-3))
    close(weights_of(batch, {"bound": "truncate"})[0], math.exp(-3))


def test_extremes_differ():
    """D15. verl's `rollout_is_max` is of truncated weights at token level and of ratios at sequence level."""
    batch = fixed_rows([[3.0]])
    for level, expected in (("token", 2.0), ("sequence", math.exp(3))):
        close(verl.correction(batch, {"rollout_is": level})[2]["rollout_corr/rollout_is_max"], expected)
        found = our_metrics(batch, {"weight": {"level": level}})
        close(found["weight_max"], 2.0)
        close(found["ratio_max"], math.exp(3))


def test_skyrl_narrowed_mask_differs():
    """D16. SkyRL's masks look at what the masks before them left; `aggregate: kept` says so, the default does not."""
    batch = fixed_rows([[0.0, 1.0]])
    settings = skyrl.settings(
        token_mask_is_threshold_low=0.5, token_mask_is_threshold_high=2.0, sequence_mask_metric="geometric"
    )
    assert skyrl.correction(batch, settings)[1].tolist() == [[1, 0]]
    mapping = skyrl.mapping_of(settings)
    assert ours(batch, mapping).keep.tolist() == [True, False]
    assert ours(batch, mapping | {"aggregate": "valid"}).keep.tolist() == [False, False]


def test_skyrl_outlier_before_token_mask_differs():
    """D16. SkyRL looks for outliers before its token mask and at sequences after it: a rule's own `aggregate`.

    With one `aggregate` for all rules ours would drop the outlier's token alone, and keep its sequence.
    """
    batch = fixed_rows([[0.0, 5.0]])
    settings = skyrl.settings(
        token_mask_is_threshold_low=0.5, token_mask_is_threshold_high=2.0, sequence_mask_metric="geometric",
        outlier_token_is_threshold_high=100.0,
    )  # fmt: skip
    assert skyrl.correction(batch, settings)[1].tolist() == [[0, 0]]
    mapping = skyrl.mapping_of(settings)
    assert ours(batch, mapping).keep.tolist() == [False, False]
    alike = [{k: v for k, v in rule.items() if k != "aggregate"} for rule in mapping["reject"]]
    assert ours(batch, mapping | {"reject": alike}).keep.tolist() == [True, False]


def test_saturation_differs():
    """D17. Products of e^25 and e^40 are both e^20 to verl's chi2. Ours too; beside it stand two without a clamp."""
    values = []
    for total in (25.0, 40.0):
        batch = fixed_rows([[total / 5] * 5])
        theirs = verl.correction(batch, {})[2]["rollout_corr/chi2_seq"]
        found = our_metrics(batch, {"weight": None})
        close(theirs, math.exp(40))
        close(found["chi2_sequence"], theirs)
        assert found["saturated_sequences"] == 1.0
        values.append(found["log_chi2_sequence"])
    assert values == pytest.approx([50.0, 80.0], rel=WRITTEN)


def test_mismatch_metric_differs():
    """D18. verl's `rollout_probs_diff_*` are of probabilities, against its docstring; TRL's are of log-probs."""
    batch = fixed_rows([[0.1, 0.3]])
    differences = [math.exp(x - 2) - math.exp(-2) for x in (0.1, 0.3)]
    close(verl.debug_metrics(batch)["training/rollout_probs_diff_max"], max(differences))
    close(trl.correction(batch, "token_truncate")[1]["sampling/sampling_logp_difference/max"], 0.3)
    found = our_metrics(batch, {"weight": None})
    close(found["prob_diff_abs_max"], max(differences))
    close(found["log_prob_diff_abs_max"], 0.3)


def test_verl_all_zero_differs():
    """verl fails where every weight is 0, dividing by their squares for an effective sample size. Ours is not known."""
    batch = fixed_rows([[5.0, -5.0]])
    settings = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
    with pytest.raises(ZeroDivisionError):
        verl.correction(batch, settings)
    mapping = verl.mapping_of(settings)
    assert weights_of(batch, mapping["weight"]) == [0.0, 0.0]
    assert "ess" not in our_metrics(batch, mapping)


def test_empty_response_differs():
    """A response without a valid token is a perplexity of 1 to verl and ms-swift, and a weight of 0 to verl.

    It is nothing to us. verl itself leaves it out of what one rejection option reports, but not of all together.
    """
    batch = fixed_rows([[1.0, 1.0], [1.0, 1.0]], [[1, 1], [0, 0]])
    rule = {"rollout_is": "token", "rollout_is_threshold": 5.0, "rollout_rs": "token_k2", "rollout_rs_threshold": "0.1"}
    _, _, theirs = verl.correction(batch, rule)
    found = our_metrics(batch, verl.mapping_of(rule))
    close(found["train_ppl"], math.e)
    for ppl in (theirs["rollout_corr/training_ppl"], ms_swift.mismatch_metrics(batch)["training_ppl"]):
        close(ppl, (math.e + 1) / 2)
    close(theirs["rollout_corr/rollout_is_seq_mean"], math.e / 2)
    close(found["sequence_weight_mean"], math.e)
    close(theirs["rollout_corr/rollout_rs_token_k2_seq_masked_fraction"], 1.0)
    close(theirs["rollout_corr/rollout_rs_seq_masked_fraction"], 0.5)
    assert (found["rule_1_unit_rejected_fraction"], found["touched_sequences"]) == (1.0, 1.0)


def test_clamped_tokens_differ():
    """verl's rules over sequences and ms-swift's geometric mean clamp tokens at +-20 before they add; ours does not.

    log r of 30 and -20.5 is 9.5 together and 0 to them. verl's own sequence weight adds first, as ours.
    """
    batch = fixed_rows([[30.0, -20.5]])
    _, mask, _ = verl.correction(batch, {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"})
    assert mask.tolist() == [[1, 1]]
    assert ours(batch, {"weight": None, "reject": [{"over": "sum", "lower": 0.5, "upper": 2.0}]}).keep.sum() == 0
    weight = verl.correction(batch, {"rollout_is": "sequence", "rollout_is_threshold": 1e9})[0][0, 0].item()
    close(weight, math.exp(9.5))
    close(weights_of(batch, {"level": "sequence", "upper": 1e9})[0], math.exp(9.5))
    close(ms_swift.weights(batch, "sequence_truncate", 1e9)[0, 0].item(), 1.0)
    close(weights_of(batch, {"level": "geometric", "upper": 1e9})[0], math.exp(9.5 / 2))


def test_verl_bypass_weight_differs():
    """verl's `bypass_mode` with PPO's clip computes weights, reports them and applies none; we refuse the config."""
    batch = fixed_rows([[0.1, 0.15]])
    config = verl.Settings(rollout_is="token", rollout_is_threshold=1.05, loss_type="ppo_clip")
    loss = verl.bypass_loss(batch, batch.proximal, config, "token-sum")
    close(loss.item(), -(math.exp(0.1) + math.exp(0.15)))
    with pytest.raises(ConfigError, match="would count it twice"):
        from_mapping(verl.mapping_of(config) | {"objective": {"old": "behavior", "surrogate": "clip"}})


def test_skyrl_padding_differs():
    """SkyRL's `is_ratio_min` and `is_ratio_std` count a ratio of 0 for every token of the padding."""
    batch = fixed_rows([[0.1, 0.2], [0.1]])
    _, _, theirs = skyrl.correction(batch, skyrl.settings(tis_ratio_type="token"))
    found = our_metrics(batch, {"weight": None})
    assert theirs["is_ratio_min"] == 0.0
    close(found["ratio_min"], math.exp(0.1))
    deviation = math.sqrt(found["chi2_token"] + 1 - found["ratio_mean"] ** 2)
    assert theirs["is_ratio_std"] > 0.5 > 0.1 > deviation


def test_verl_deviation_differs():
    """verl adds 1e-8 to the number of tokens, and so the deviation of equal weights is 7e-5 and not 0."""
    batch = fixed_rows([[0.0, 0.0]])
    theirs = verl.correction(batch, {"rollout_is": "token"})[2]["rollout_corr/rollout_is_std"]
    assert 7e-5 < theirs < 8e-5
    assert our_metrics(batch, {"weight": {"level": "token"}})["weight_std"] == 0.0


def test_sequence_ratio_gradient_differs():
    """verl's GSPO gives each token the gradient of its own weight, TRL's and ours that of the sequence's mean weight.

    verl replaces the sequence's ratio by sg(s) pi_theta / sg(pi_theta) of each token (the paper's GSPO-token); the two
    are the same where all tokens of a sequence weigh the same.
    """
    batch, weights = fixed_rows([[0.0, 0.6]]), {"rollout_is": "token", "rollout_is_threshold": 9.0}
    target = batch.pad(batch.target).requires_grad_()
    (theirs,) = torch.autograd.grad(
        verl.surrogate_loss(batch, target, weights, "gspo", "token-sum", Clip(0.2, 0.28, 3.0)), target
    )
    assert theirs[0].tolist() == pytest.approx([-1.0, -math.exp(0.6)], rel=WRITTEN)
    mean = (1 + math.exp(0.6)) / 2
    trl_loss = 2 * trl.loss(batch, target, trl.correction(batch, "token_mask")[0], importance_sampling_level="sequence")
    correction = ours(batch, verl.mapping_of(weights))
    our_loss = surrogate_loss(batch, target, batch.proximal, correction, {"ratio": "sequence"}, Clip(0.2, 0.28)).sum()
    for loss in (trl_loss, our_loss):
        assert torch.autograd.grad(loss, target)[0][0].tolist() == pytest.approx([-mean, -mean], rel=WRITTEN)


def test_areal_m2po_keeps_one_token():
    """AReaL leaves the smallest square where no mean is below the threshold, and one of two equal ones; we neither."""
    for log_ratios, theirs, ours_ in (([2.0, 3.0], [1, 0], [0, 0]), ([1.0, 0.0, -1.0], [0, 1, 1], [0, 1, 0])):
        batch = fixed_rows([log_ratios])
        assert areal.m2po_mask(batch, 0.6).sum().item() == sum(theirs)
        assert ours(batch, {"weight": None, "m2_threshold": 0.6}).keep.int().tolist() == ours_


def test_vespo_weights_differ():
    """TRL multiplies the capped ratios to the rollout engine into the sequence's ratio; our weight multiplies phi.

    log r of 1 at both tokens, capped at 1: TRL's s is 1, and its phi; ours, against mu, is phi(e^2).
    """
    batch = fixed_rows([[1.0, 1.0]])
    capped, _ = trl.correction(batch, "token_truncate", 1.0)
    target = batch.pad(batch.target)
    plain = -target.mean().item()
    close(trl.loss(batch, target, capped, loss_type="vespo").item(), plain)
    objective = {"surrogate": "vespo", "old": "behavior"}
    mine = surrogate_loss(batch, target, batch.behavior, ours(batch, {"weight": None}), objective, Clip(0.2, 0.2))
    close(mine.mean().item(), plain * math.exp(3 + 2 * 2 - 3 * math.exp(2)))


def test_gmpo_weights_differ():
    """verl's weight of a sequence is the geometric mean of its tokens', ours their mean: of 1 and e^0.6."""
    batch, weights = fixed_rows([[0.0, 0.6]]), {"rollout_is": "token", "rollout_is_threshold": 9.0}
    target, clip = batch.pad(batch.target), Clip(0.4, 0.4, 3.0)
    theirs = verl.surrogate_loss(batch, target, weights, "geo_mean", "token-mean", clip)
    close(theirs.item(), -math.exp(0.3))
    correction = ours(batch, verl.mapping_of(weights))
    mine = surrogate_loss(batch, target, batch.proximal, correction, {"surrogate": "gmpo"}, clip)
    close(mine.mean().item(), -(1 + math.exp(0.6)) / 2)
    assert trl.gmpo_loss(batch, target, clip).item() == pytest.approx(-1.0, rel=WRITTEN)  # TRL weighs nothing


def test_dppo_kl_of_a_certain_token_differs():
    """From 0.994 to almost 1 at A > 0 and delta 0.05: TRL, verl and SkyRL mask the token, and ours holds it.

    Of the probability of all other tokens ours knows 1e-6 at least, TRL 1e-7, verl and SkyRL 1e-8 more than there is.
    """
    batch, clip = fixed_rows([[0.0]]), Clip(0.05, 0.05, 3.0)
    batch.batch.behavior[0][0] = batch.batch.proximal[0][0] = math.log(0.994)
    batch = replace(batch, target=[torch.tensor([-1e-9], dtype=torch.float64)])
    kl = lambda others: 0.994 * math.log(0.994) + 0.006 * math.log(0.006 / others)  # noqa: E731
    assert kl(1e-6) < clip.high < kl(1e-7) < kl(1e-8)
    assert trl.dppo_mask(batch, "binary_kl", clip).item() == 0
    for judge in (
        lambda x: verl.surrogate_loss(batch, x, {}, "dppo_kl", "token-sum", clip),
        lambda x: skyrl.dppo_loss(batch, x, "binary_kl", clip),
    ):
        assert judge(batch.pad(batch.target)).item() == 0
    target = batch.pad(batch.target).requires_grad_()
    objective = {"surrogate": "dppo_kl", "old": "behavior"}
    mine = surrogate_loss(batch, target, batch.behavior, ours(batch, {"weight": None}), objective, clip)
    (gradient,) = torch.autograd.grad(mine.sum(), target)
    close(gradient.item(), -1 / 0.994)


def test_dppo_cap_differs():
    """Where no cap is set: 20 in TRL and ours; verl's actor sets 3, so that the 20 of its function never acts."""
    batch = fixed_rows([[0.0]])
    batch = replace(batch, target=[torch.tensor([-2.0 + math.log(5.0)])])
    target, wide = batch.pad(batch.target), Clip(1.0, 1.0)
    theirs = verl.actor_defaults()
    config = theirs["clip_ratio_c"]
    assert config == from_verl.CLIP_RATIO_C == 3.0
    assert {theirs[name] for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")} == {from_verl.CLIP_RATIO}
    log_prob = target.item()
    close(trl.dppo_loss(batch, target, "binary_tv", wide).item(), -5 * log_prob)
    objective = {"surrogate": "dppo_tv", "old": "behavior"}
    mine = surrogate_loss(batch, target, batch.behavior, ours(batch, {"weight": None}), objective, wide)
    close(mine.sum().item(), -5 * log_prob)
    capped = verl.surrogate_loss(batch, target, {}, "dppo_tv", "token-sum", Clip(1.0, 1.0, config))
    close(capped.item(), -3 * log_prob)
