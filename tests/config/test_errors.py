"""Every mistake a user can make: one `MisError` that quotes the user's key and says what to do."""

from types import SimpleNamespace

import pytest
import torch
from batches import MILES_YAML, host_args, ratio_batch
from commands import ran
from drive import one_rank

from mis_plugins import mis
from mis_plugins.config.flat import from_flat
from mis_plugins.config.reading import from_args, from_mapping
from mis_plugins.errors import ConfigError, InputError, MisError

GOOD = {"weight": {"level": "token", "bound": "truncate", "upper": 2.0}}

NESTED = [
    ({"wieght": {}}, r"mis\.wieght: unknown key.*weight"),
    ({"weight": {"bound": "clip", "lower": 0.9999999999, "upper": 1.0000000001}},
     r"mis\.weight\.lower: 1 is not below mis\.weight\.upper: 1 in a float of 32 bits"),
    ({"weight": {"bound": "clip", "upper": 1.0000000001}}, r"lower: unset means 1 / mis\.weight\.upper: 1, not below"),
    ({"weight": None, "reject": [{"over": "token", "upper": 2, "down_weigh": 0.9999999999}]}, r"down_weigh: got 1"),
    *(({"weight": None, **within(size)}, r"expected a number that a float of 32 bits holds in full")
      for size in ("1e-50", 1e-40, 1e39, -1e39, 10**400) for within in (
          lambda size: {"opsm": {"delta": size}}, lambda size: {"m2_threshold": size},
          lambda size: {"reject": [{"statistic": "k3", "lower": size}]}, lambda size: {"keep_floor": size})),
    ({"reference": "target"}, r"^mis\.reference: target is refused: .* pi_theta\^2 / \(pi_old mu\)"),
    ({"segment_wise": {"reference": "target"}}, r"^mis\.segment_wise\.reference: target .*pi_theta\^2"),
    ({"weight": {"reference": "behavior"}}, r"mis\.weight\.reference: unknown key"),
    ({"weight": {"levle": "token"}}, r"mis\.weight\.levle: unknown key.*level"),
    ({"weight": {"normalize": {"scop": "rollout"}}}, r"mis\.weight\.normalize\.scop: unknown key.*scope"),
    ({"weight": {}, "reject": [{"over": "min", "lower": 0.1}, {"ovr": "min"}]},
     r"mis\.reject\[1\]\.ovr: unknown key.*over"),
    ({"weight": {"level": "seq"}},
     r"mis\.weight\.level: got 'seq'; choose one of token, segment, segment_geometric, sequence, geometric"),
    ({"weight": {"bound": "trunc"}}, r"mis\.weight\.bound: got 'trunc'; choose one of none, .*truncate, .*zero"),
    ({"weight": {"normalize": {"scope": "batch"}}},
     r"mis\.weight\.normalize\.scope: got 'batch'; choose one of micro_batch"),
    ({"weight": {"normalize": {"over": "all"}}}, r"mis\.weight\.normalize\.over: got 'all'; choose one of valid, kept"),
    ({"weight": {}, "reject": [{"over": "max_", "upper": 2}]},
     r"mis\.reject\[0\]\.over: got 'max_'; choose one of token"),
    ({"weight": {}, "metrics": "some"}, r"mis\.metrics: got 'some'; choose one of watch, all, full, core, none"),
    ({"weight": {"level": "{upper}"}}, r"mis\.weight\.level: got '\{upper\}'; choose"),  # a user's own braces
    ({"weight": {"{upper}": 2}}, r"mis\.weight\.\{upper\}: unknown key; did you mean upper"),
    ({"weight": {"upper": "two"}}, r"mis\.weight\.upper: got 'two'; expected a number"),
    ({"weight": {"upper": "0.5_5"}}, r"mis\.weight\.upper: got '0\.5_5'; expected a number"),  # to Python 0.55
    ({"objective": {"surrogate": "reinforce"}}, r"mis\.objective\.old: proximal with mis\.objective\.surrogate: rein"),
    ({"weight": {"upper": True}}, r"mis\.weight\.upper: got True; expected a number"),
    ({"weight": {"upper": [2.0]}}, r"mis\.weight\.upper: got \[2\.0\]; expected a number"),
    ({"weight": {"upper": None}}, r"mis\.weight\.upper: got None"),
    ({"weight": "token"}, r"mis\.weight: got 'token'; expected a mapping"),
    ({"weight": {"normalize": True}}, r"mis\.weight\.normalize: got True; expected a mapping"),
    ({"weight": {}, "reject": {"over": "min"}}, r"mis\.reject: .*expected a list"),
    ("weight", r"mis: got 'weight'; expected a mapping"),
    ({"weight": {"bound": "clip", "lower": 3.0, "upper": 2.0}}, r"mis\.weight\.lower: 3 .*mis\.weight\.upper: 2"),
    ({"weight": {"bound": "clip", "lower": 2.0, "upper": 2.0}}, r"mis\.weight\.lower: 2 .*mis\.weight\.upper: 2"),
    ({"weight": {"bound": "mask", "upper": 0.5}}, r"mis\.weight\.lower.*mis\.weight\.upper"),
    ({"weight": {"upper": -1.0}}, r"mis\.weight\.upper: got -1"),
    ({"weight": {"upper": float("nan")}}, r"mis\.weight\.upper: got nan"),
    ({"weight": {"upper": float("inf")}}, r"mis\.weight\.upper: got inf"),
    ({"weight": {"bound": "clip", "lower": -0.5}}, r"mis\.weight\.lower: got -0\.5; .* or 0 for no lower bound"),
    ({"weight": {}, "reject": [{"over": "min", "lower": 0.0}]},
     r"mis\.reject\[0\]\.lower: got 0; .* or null for no lower bound"),
    ({"weight": {}, "reject": [{"over": "sum", "lower": 2.0, "upper": 1.0}]},
     r"mis\.reject\[0\]\.lower: 2 .*mis\.reject\[0\]\.upper: 1"),
    # Settings without effect.
    ({"weight": {"bound": "truncate", "lower": 0.5}},
     r"mis\.weight\.lower: 0\.5 has no effect with mis\.weight\.bound: truncate"),
    ({"weight": {}, "reject": [{"over": "token"}]},
     r"mis\.reject\[0\]\.lower and mis\.reject\[0\]\.upper are both unset"),
    ({"weight": {"normalize": {"over": "kept"}}}, r"mis\.weight\.normalize\.over: kept has no effect"),
    ({"objective": {"surrogate": "dppo_tv", "ratio": "sequence"}},
     r"mis\.objective\.ratio: sequence contradicts mis\.objective\.surrogate: dppo_tv, whose divergence is of a token"),
    *(({"objective": {"surrogate": name, "ratio": "sequence"}},
       rf"mis\.objective\.ratio: sequence beside mis\.objective\.surrogate: {name}, which .* over the sequence")
      for name in ("vespo", "gmpo")),
    ({"objective": {"surrogate": "ipo", "ratio": "sequence"}}, r"ratio: sequence contradicts .*surrogate: ipo, whose"),
    ({"weight": None, "m2_threshold": 0}, r"mis\.m2_threshold: got 0; give a finite number above 0"),
    ({"weight": None, "m2_threshold": float("nan")}, r"mis\.m2_threshold: got nan; give a finite number above 0"),
    ({"weight": {"normalize": {"scope": "rollout", "over": "kept"}}, "m2_threshold": 0.04},
     r"mis\.weight\.normalize\.over: kept with .*scope: rollout is a mean over the rollout, and mis\.m2_threshold"),
    *(({"weight": {"level": level, "normalize": {"scope": "rollout"}}, "m2_threshold": 0.04, "aggregate": "kept"},
       r"mis\.aggregate: kept with .*scope: rollout is a mean over the rollout, and mis\.m2_threshold drops tokens of")
      for level in ("segment", "sequence", "geometric")),
    # A config names one objective.
    ({"objective": {"surrogate": "sapo", "k_pos": 2}},
     r"mis\.objective\.k_pos: 2 is of mis\.objective\.surrogate: vespo, beside mis\.objective\.surrogate: sapo; a "
     "config names one objective"),
    ({"objective": {"tau_neg": 1.05}}, r"mis\.objective\.tau_neg: 1\.05 is of .*surrogate: sapo, beside .*: clip; a"),
    ({"objective": {"surrogate": "gmpo", "lambda_neg": 2}}, r"lambda_neg: 2 is of .*surrogate: vespo, beside .*: gmpo"),
    ({"objective": {"surrogate": ["sapo", "gmpo"]}}, r"mis\.objective\.surrogate: got \['sapo', 'gmpo'\]; choose one"),
    ({"objective": {"surrogate": "sapo", "tau_pos": 0}}, r"mis\.objective\.tau_pos: got 0; give a number from 1e-06"),
    ({"objective": {"surrogate": "sapo", "tau_neg": 1e-30}}, r"tau_neg: got 1e-30; give a number from 1e-06 to 1e\+06"),
    ({"objective": {"surrogate": "vespo", "k_neg": float("inf")}}, r"mis\.objective\.k_neg: got inf; give a number"),
    ({"objective": {"kl_tau": -1}}, r"mis\.objective\.kl_tau: got -1; give a number from 0 to 1e\+06"),
    ({"objective": {"kl_tau": 3e38}}, r"mis\.objective\.kl_tau: got 3e\+38; give a number from 0 to 1e\+06"),
    ({"objective": {"kl_tau": 0.1, "ratio": "sequence"}},
     r"mis\.objective\.kl_tau: 0\.1 penalizes the ratio of a token, and mis\.objective\.ratio: sequence has none"),
    ({"objective": {"kl_tau": 0.1, "surrogate": "gmpo"}}, r"kl_tau: 0\.1 .*, and mis\.objective\.surrogate: gmpo has"),
    ({"weight": {}, "objective": {"surrogate": "sapo", "old": "behavior"}}, r"mis\.weight: .*would count it twice"),
    ({"weight": {}, "objective": {"surrogate": "dppo_kl", "old": "behavior"}},
     r"mis\.weight: with mis\.objective\.old: behavior the clipped ratio is pi_theta / mu already"),
    ({"weight": {}, "reject": [{"upper": 2, "down_weigh": 1.0}]},
     r"mis\.reject\[0\]\.down_weigh: got 1; give a factor above 0 and below 1, or drop the key"),
    ({"weight": {}, "reject": [{"upper": 2, "down_weigh": 0}]}, r"mis\.reject\[0\]\.down_weigh: got 0; give a factor"),
    ({"weight": {}, "reject": [{"upper": 2, "down_weigh": ".nan"}]}, r"mis\.reject\[0\]\.down_weigh"),
    ({"weight": {}, "reject": [{"over": "mean", "upper": 2, "down_weigh": 0.5}]},
     r"mis\.reject\[0\]\.down_weigh: 0\.5 needs mis\.reject\[0\]\.over: token; over mean a rule drops whole"),
    ({"weight": {"normalize": {"over": "kept"}}, "reject": [{"upper": 2, "down_weigh": 0.5}]},
     r"mis\.weight\.normalize\.over: kept has no effect where nothing is rejected"),
    ({"weight": {}, "reject": [{"upper": 2, "down_weigh": 0.5}], "denominator": "kept"},
     r"mis\.denominator: kept has no effect where nothing is rejected"),
    ({"weight": {"level": "sequence"}, "reject": [{"upper": 2, "down_weigh": 0.5}], "aggregate": "kept"},
     r"mis\.aggregate: kept has no effect without a rule or mask bound on tokens"),
    ({"weight": {}, "reject": [{"upper": 2, "down_weigh": 0.5}], "on_all_rejected": "raise"},
     r"mis\.on_all_rejected: raise has no effect where nothing is rejected"),
    ({"weight": None, "reject": [{"over": "token", "upper": 2, "aggregate": "kept"}]},
     r"mis\.reject\[0\]\.aggregate: kept has no effect with mis\.reject\[0\]\.over: token"),
    ({"weight": None, "reject": [{"over": "max", "upper": 2, "aggregate": "kept"}]},
     r"mis\.reject\[0\]\.aggregate: kept has no effect without a rule or mask bound on tokens or segments"),
    ({"weight": None, "reject": [{"over": "mean", "upper": 2}, {"over": "sum", "upper": 2, "unit": "segment",
                                                                "aggregate": "kept"}]},
     r"mis\.reject\[1\]\.aggregate: kept has no effect without a rule or mask bound on tokens$"),
    ({"weight": None, "reject": [{"over": "mean", "upper": 2, "unit": "segment"}], "aggregate": "kept"},
     r"mis\.aggregate: kept has no effect without a rule or mask bound on tokens or segments, and a weight or"),
    ({"weight": {"level": "segment"}, "reject": [{"over": "mean", "upper": 2, "unit": "segment"}], "aggregate": "kept"},
     r"mis\.aggregate: kept has no effect without a rule or mask bound on tokens or segments, and a weight or"),
    ({"weight": None, "reject": [{"over": "token", "upper": 2}, {"over": "sum", "upper": 2, "aggregate": "kept"}],
      "aggregate": "kept"}, r"mis\.aggregate: kept has no effect .*rule on larger units that does not say otherwise"),
    ({"weight": None, "reject": [{"over": "token", "upper": 2}, {"over": "max", "upper": 9, "aggregate": "valid"}],
      "aggregate": "kept"}, r"mis\.aggregate: kept has no effect without a rule or mask bound on tokens or segments"),
    ({"weight": None, "reject": [{"over": "token", "upper": 2}, {"over": "mean", "upper": 9, "aggregate": "kept"}],
      "on_all_rejected": "keep"}, r"mis\.on_all_rejected: keep has nothing to add up"),
    ({"weight": {"normalize": {"scope": "rollout", "over": "kept"}}, "reject": [{"over": "mean", "upper": 9}],
      "on_all_rejected": "keep"}, r"mis\.weight\.normalize\.over: kept with .*scope: rollout is a mean over the "
     r"rollout, and mis\.on_all_rejected: keep gives tokens back by micro-batch; use valid"),
    ({"weight": None, "reject": [{"over": "mean", "upper": 9, "aggregate": "all"}]},
     r"mis\.reject\[0\]\.aggregate: got 'all'; choose one of valid, kept"),
    ({"weight": None, "reject": [{"statistic": "binary_kl", "upper": 13.8156}]},
     r"mis\.reject\[0\]\.upper: got 13\.8156; binary_kl over token lies between 0 and 13\.8155, so that nothing or"),
    ({"weight": None, "reject": [{"statistic": "abs_prob_diff", "upper": 1}]},
     r"mis\.reject\[0\]\.upper: got 1; abs_prob_diff over token lies between 0 and 1, so that nothing or"),
    ({"weight": None, "reject": [{"statistic": "k3", "over": "sum", "lower": 0, "upper": 1}]},
     r"mis\.reject\[0\]\.lower: got 0; k3 over sum lies between 0 and inf"),
    ({"weight": None, "reject": [{"statistic": "binary_kl", "over": "mean", "lower": 14}]},
     r"mis\.reject\[0\]\.lower: got 14; binary_kl over mean lies between 0 and 13\.8155"),
    ({"reject": [{"over": "min", "lower": 1e-4}]}, r"mis\.weight: missing beside mis\.reject"),
    # Segment-wise weights.
    ({"segment_wise": {"cap": 3}}, r"^mis\.segment_wise\.cap: unknown key"),
    ({"segment_wise": {"enabld": True}}, r"enabld: unknown key; did you mean enabled\?"),
    ({"segment_wise": True}, r"^mis\.segment_wise: got True; expected a mapping of enabled, weight_cap"),
    ({"segment_wise": {"mode": "drop"}},
     r"^mis\.segment_wise\.mode: got 'drop'; choose one of .*truncate, .*zero"),
    ({"segment_wise": {"too_old": "error"}},
     r"^mis\.segment_wise\.too_old: got 'error'; choose one of raise, drop"),
    ({"segment_wise": {"weight_cap": "high"}}, r"^mis\.segment_wise\.weight_cap: got 'high'; expected a number"),
    ({"segment_wise": {"weight_cap": 0}}, r"^mis\.segment_wise\.weight_cap: got 0; every ratio is above 0"),
    ({"weight": {"upper": 1e-46}}, r"^mis\.weight\.upper: got 1e-46; expected a number that a float"),
    ({"segment_wise": {"mode": "clip", "weight_floor": 6}},
     r"^mis\.segment_wise\.weight_floor: 6 is not below mis\.segment_wise\.weight_cap: 5"),
    ({"segment_wise": {"weight_floor": 0.2}},
     r"^mis\.segment_wise\.weight_floor: 0\.2 has no effect with mis\.segment_wise\.mode: truncate"),
    ({"segment_wise": {"weight_cap": 0.5, "mode": "clip"}},
     r"weight_floor: unset means 1 / mis\.segment_wise\.weight_cap: 2, not below mis\.segment_wise\.weight_cap"),
    ({"segment_wise": {"weight_cap": None, "weight_floor": 0.5}},
     r"^mis\.segment_wise\.weight_floor: 0\.5 has no effect"),
    ({"segment_wise": {"weight_cap": None, "mode": "zero"}},
     r"^mis\.segment_wise\.mode: zero needs a mis\.segment_wise\.weight_cap"),
    ({"segment_wise": {"method": "loglinear", "too_old": "drop"}},
     r"^mis\.segment_wise\.too_old: drop has no effect with mis\.segment_wise\.method: loglinear"),
    ({"segment_wise": {"enabled": False, "fresh_tokens": "behavior"}},
     r"^mis\.segment_wise\.fresh_tokens: behavior has no effect with mis\.segment_wise\.enabled: false"),
    ({"segment_wise": {"enabled": False, "clip_against": "proximal"}},
     r"^mis\.segment_wise\.clip_against: proximal has no effect with mis\.segment_wise\.enabled: false"),
    ({"weight": {}, "segment_wise": {"weight_cap": 5.0}},
     r"^mis\.segment_wise\.weight_cap: has no effect beside mis\.weight, which has bounds"),
    ({"weight": {}, "segment_wise": {"mode": "truncate"}}, r"^mis\.segment_wise\.mode: has no effect beside"),
    ({"weight": None, "segment_wise": {}}, r"^mis\.weight: null contradicts mis\.segment_wise"),
    ({"weight": {"level": "geometric"}, "segment_wise": {}},
     r"^mis\.weight\.level: geometric beside mis\.segment_wise, which weighs each token by itself; use token"),
    ({"segment_wise": {}, "objective": {"old": "behavior"}},
     r"^mis\.segment_wise: a weight pi_\{v\+1\} / mu belongs to mis\.objective\.old: proximal"),
    ({"segment_wise": {"enabled": False, "mode": "clip"}, "objective": {"old": "behavior"}},
     r"^mis\.segment_wise\.mode: has no effect with mis\.objective\.old: behavior"),
    ({"segment_wise": {"mode": "mask"}, "on_all_rejected": "keep"},
     r"keep cannot give back what mis\.segment_wise\.mode: mask takes.*mis\.segment_wise\.mode: clip"),
]  # fmt: skip

FLAT = [
    ({"tis_level": "seq"}, r"tis_level: got 'seq'; choose one of token, sequence, geometric"),
    ({"tis_mode": "trunc"}, r"tis_mode: got 'trunc'; choose one of truncate, clip, mask"),
    ({"rs_level": "seq"}, r"rs_level: got 'seq'; choose one of"),
    ({"tis_upper_bound": None}, r"tis_upper_bound: unset"),
    ({"tis_upper_bound": -1}, r"tis_upper_bound: got -1"),
    ({"tis_upper_bound": 0}, r"tis_upper_bound: got 0"),
    ({"tis_upper_bound": "two"}, r"tis_upper_bound: got 'two'; expected a number"),
    ({"tis_lower_bound": 3.0}, r"tis_lower_bound: 3 .*tis_upper_bound: 2"),
    ({"tis_lower_bound": 3.0, "tis_mode": "clip"}, r"tis_lower_bound: 3 .*tis_upper_bound: 2"),
    ({"tis_mode": "mask", "tis_lower_bound": None, "tis_upper_bound": 0.9}, r"tis_lower_bound.*tis_upper_bound"),
    ({"rs_lower_bound": 1.2, "rs_upper_bound": 1.1}, r"rs_lower_bound: 1\.2 .*rs_upper_bound: 1\.1"),
    ({"rs_upper_bound": 0.4}, r"rs_lower_bound.*from.*tis_.*rs_upper_bound: 0\.4"),
    ({"rs_veto_threshold": 0}, r"rs_veto_threshold: got 0"),
    ({"rs_veto_threshold": -1e-4}, r"rs_veto_threshold: got -0\.0001"),
    ({"use_rs": "yes"}, r"use_rs: got 'yes'; expected true or false"),
    ({"tis_batch_normalize": "micro"}, r"tis_batch_normalize: got 'micro'; expected true or false"),
]


@pytest.mark.parametrize(("mapping", "message"), NESTED)
def test_nested(mapping: object, message: str):
    with pytest.raises(ConfigError, match=message):
        from_mapping(mapping)  # type: ignore[arg-type]


@pytest.mark.parametrize(("change", "message"), FLAT)
def test_flat(change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        from_flat(MILES_YAML | change)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"tis_levle": "token", **MILES_YAML}, r"tis_levle: unknown key.*tis_level"),
        ({"rs_veto": 1e-4, **MILES_YAML}, r"rs_veto: unknown key"),
        ({"mis_weight": {}}, r"mis_weight: unknown key"),
        ({"tis_batch_normalise": True}, r"tis_batch_normalise: unknown key.*tis_batch_normalize"),
        ({"mis": GOOD, "tis_level": "token"}, r"both `mis:` and .*tis_level"),
        ({"mis": GOOD, "use_rs": True}, r"both `mis:` and .*use_rs"),
        ({}, r"--use-tis is set but nothing says how to correct"),
        ({"mis": {"metrics": "core"}}, r"--use-tis is set but nothing says how to correct"),
        ({"mis": [1]}, r"mis: got \[1\]; expected a mapping"),
    ],
)
def test_namespace(attributes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        from_args(SimpleNamespace(use_tis=True, **attributes))


def test_one_family():
    """A user catches MisError, or ValueError."""
    assert issubclass(ConfigError, MisError) and issubclass(InputError, MisError) and issubclass(MisError, ValueError)


def test_a_field_of_a_field_is_quoted_by_its_own_name_or_by_that_of_the_whole():
    names = {"weight": "tis", "weight.upper": "tis_upper_bound"}
    error = ConfigError("{weight.lower}: 3 is not below {weight.upper}: 2; see {weight}, {reject}")
    quoted = error.spelled(names, "mis.")
    assert str(quoted) == "tis.lower: 3 is not below tis_upper_bound: 2; see tis, mis.reject"
    assert type(quoted) is ConfigError
    assert str(error) == "weight.lower: 3 is not below weight.upper: 2; see weight, reject"


# ---------------------------------------------------------------------------------------------------------- inputs


def call(entry: str = "compute_mis_weights_with_cp", args: SimpleNamespace | None = None, **change: object) -> None:
    batch = ratio_batch([[0.5, 2.0, 1.0], [1.5], [1.1, 0.9]])
    kwargs = batch.hook_kwargs() | {"parallel_state": one_rank(), "max_seq_lens": None} | change
    getattr(mis, entry)(args or host_args(mis=GOOD), **kwargs)


ONES = [torch.ones(3), torch.ones(1), torch.ones(2)]
INPUTS = [
    ({"train_log_probs": None}, r"train_log_probs: .*None"),
    ({"rollout_log_probs": None}, r"rollout_log_probs: .*None"),
    ({"rollout_log_probs": ONES[:2]}, r"rollout_log_probs: 2 sequences.*3"),
    ({"train_log_probs": [*ONES, torch.ones(1)]}, r"train_log_probs: 4 sequences.*3"),
    ({"loss_masks": ONES[:2]}, r"loss_masks: 2 sequences.*3"),
    ({"rollout_log_probs": [ONES[0], torch.ones(2), ONES[2]]}, r"rollout_log_probs\[1\]: 2 tokens.*sequence 1 has 1"),
    ({"train_log_probs": [ONES[0], ONES[1], torch.ones(5)]}, r"train_log_probs\[2\]: 5 tokens.*sequence 2 has 2"),
    ({"loss_masks": [torch.ones(4), ONES[1], ONES[2]]}, r"loss_masks\[0\]: 4 tokens.*sequence 0 has 3"),
    ({"rollout_log_probs": [ONES[0], None, ONES[2]]}, r"rollout_log_probs\[1\]: .*None"),
    ({"pg_loss": torch.ones(5)}, r"pg_loss: shape \[5\].*6"),
    ({"pg_loss": torch.ones(6, 1)}, r"pg_loss: shape \[6, 1\], not 1-D.*6"),  # broadcasts over the weights
    ({"total_lengths": [6, 4]}, r"total_lengths.* 2 .*3"),
    ({"total_lengths": [6, 4, 1]}, r"total_lengths\[2\].*1.*2"),
    ({"response_lengths": [3, 1]}, r"response_lengths"),
]


@pytest.mark.parametrize(("change", "message"), INPUTS)
def test_inputs(change: dict, message: str):
    with pytest.raises(InputError, match=message):
        call(**change)


@pytest.mark.parametrize(("change", "message"), [*INPUTS[:4], INPUTS[5], INPUTS[6], INPUTS[8]])
def test_inputs_fsdp(change: dict, message: str):
    with pytest.raises(InputError, match=message):
        call("compute_mis_weights_fsdp", **change)


OF_OTHER_TYPES = """
import torch
from argparse import Namespace
from mis_plugins import mis

rows = [torch.full((2,), -1.0), torch.full((2,), -2.0)]
good = dict(pg_loss=torch.ones(4), train_log_probs=rows, rollout_log_probs=[x - 1 for x in rows], total_lengths=[5, 5],
            loss_masks=[torch.ones(2)] * 2, response_lengths=[2, 2])
for change in (
    {name: torch.stack(list(good[name])) for name in ("train_log_probs", "rollout_log_probs", "loss_masks")},
    {"response_lengths": None}, {"total_lengths": None}, {"loss_masks": None}, {"pg_loss": None},
    {"loss_masks": [[1, 1], [1, 1]]}, {"rollout_log_probs": [x.numpy() for x in rows]},
    {"train_log_probs": [rows[0][None], rows[1]]}, {"train_log_probs": [rows[0][0], rows[1]]},
):
    args = Namespace(use_tis=True, mis={"weight": {"upper": 2.0}})
    try:
        print(mis.compute_mis_weights_with_cp(args, **good | change)[0].tolist())
    except mis.InputError as error:
        print(error)
"""


def test_what_is_no_list_of_tensors():
    """Stacked tensors are lists of their rows. In a process of its own, without the checks of annotations."""
    assert ran("-c", OF_OTHER_TYPES).stdout.splitlines() == [
        "[2.0, 2.0, 2.0, 2.0]",
        "response_lengths: missing, and qkv_format: thd needs it",
        "total_lengths: missing, and qkv_format: thd needs it",
        "loss_masks: no sequence in this micro-batch",
        "pg_loss: a NoneType, not 1-D with the 4 tokens that this rank holds",
        "loss_masks[0]: a list; expected a tensor with a number for each token",
        "rollout_log_probs[0]: a ndarray; expected a tensor with a number for each token",
        "train_log_probs[0]: shape [1, 2]; expected one dimension, with a number for each token",
        "train_log_probs[0]: shape []; expected one dimension, with a number for each token",
    ]


@pytest.mark.parametrize(("name", "value"), [
    ("use_tis", "false"), ("use_tis", "no"), ("use_tis", 1), ("get_mismatch_metrics", "true"),
    ("tis_mode", False), ("tis_mode", ""), ("tis_mode", 0), ("tis_level", False), ("rs_level", False),
    ("use_rs", ""), ("use_rs", []), ("use_mask", 0), ("tis_batch_normalize", {}),
])  # fmt: skip
def test_what_counts_as_false_is_no_unset_key(name: str, value: object):
    """YAML reads `off` and `no` as false."""
    with pytest.raises(ConfigError, match=rf"^{name}: got "):
        call(args=host_args(**({"tis_upper_bound": 2.0, "use_rs": True} | {name: value})))


def test_an_argument_that_the_host_lacks_is_named():
    with pytest.raises(ConfigError, match=r"^use_tis: missing in the host's arguments \(SimpleNamespace\)"):
        call(args=SimpleNamespace(mis=GOOD))


def test_layouts():
    padded = host_args(mis=GOOD, qkv_format="bshd")
    with pytest.raises(InputError, match="max_seq_lens: 2 sequences, but the batch has 3"):
        call(args=padded, max_seq_lens=[8, 8])
    with pytest.raises(InputError, match=r"max_seq_lens\[2\]: 4, but sequence 2 has 5 tokens"):
        call(args=padded, max_seq_lens=[8, 8, 4])
    with pytest.raises(InputError, match="max_seq_lens.*bshd"):
        call(args=host_args(mis=GOOD, qkv_format="bshd"))
    with pytest.raises(MisError, match=r"qkv_format: got 'sbhd'; choose one of thd, bshd"):
        call(args=host_args(mis=GOOD, qkv_format="sbhd"))


def test_fsdp_refuses_context_parallel_input_and_state():
    """Local pieces of a response, with the whole response's mask: what a CP rank would pass."""
    batch = ratio_batch([[0.5, 2.0, 1.0], [1.5, 1.0]])
    local, _ = batch.shard(2, 0, None)
    with pytest.raises(MisError, match="context.parallel.*compute_mis_weights_with_cp"):
        mis.compute_mis_weights_fsdp(host_args(mis=GOOD), **local.hook_kwargs())
    two = SimpleNamespace(rank=0, size=2, group=None)
    state = SimpleNamespace(cp=two, effective_dp=two, effective_dp_cp=two, is_ulysses_cp=False)
    with pytest.raises(MisError, match="context.parallel.*compute_mis_weights_with_cp"):
        call("compute_mis_weights_fsdp", parallel_state=state)
