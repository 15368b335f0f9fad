"""The page `docs/metrics.md`, made from the records of the metrics and from `metrics.yaml`, their words.

python -m lab.pages.metrics > docs/metrics.md
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.pages.metrics:main")

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from lab.provenance import parser_of
from mis_plugins.metrics import sketch, slope
from mis_plugins.metrics.alarms import PREFIX, STEP_KEY
from mis_plugins.metrics.quantity import QUANTILES
from mis_plugins.metrics.tokens import AGES, LOG_RATIO_TAILS, PROB_DIFF_TAILS, TURNS
from mis_plugins.report.readers.curves import PEERS

SAID = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SIMULATED = Path(__file__).with_name("slope.md").read_text(encoding="utf-8")
WORDS: dict[str, dict[str, str]] = SAID["metrics"]  # what, range, bad and do of each metric
BY_STEP: dict[str, str] = SAID["hook"]
OTHERWISE: dict[str, dict[str, str]] = SAID["otherwise"]

INTRODUCTION = f"""# Metrics of an optimizer step

<!-- Made by `python -m lab.pages.metrics`: change what lab/pages/metrics.yaml says of them
     instead. -->

What the TIS hook returns, a host averages over tokens or samples and over micro-batches; [hooks.md](hooks.md)
lists those metrics. A maximum, a quantile, a correlation or an effective sample size is no such average.
`mis.metrics: watch` and `all` add the metrics of this page: one number an optimizer step, exact over micro-batches,
data-parallel and context-parallel ranks however the step is split (`tests/metrics/test_partials.py`).
The metrics go to the host's tracking as `{PREFIX}NAME` beside its `{STEP_KEY}`. One line of the host's log has
them too, with or without wandb and tensorboard. All of them need

```
--custom-megatron-before-train-step-hook-path mis_plugins.mis.report_step
```

Warnings go to the log of one rank ([when a step is reported](#when-a-step-is-reported)).
"""

HOW_TO_READ = """\
The metrics `lag_...` and those of segment-wise weights need the version that wrote each token. The embedded host hands
the versions on; Miles and slime do with `mis_plugins.mis.carry_versions`: see [async.md](async.md).

r_t = pi_old(y_t) / mu(y_t) is the ratio of a token, trainer over rollout engine; w_t is its bounded weight. A token is
valid in the loss mask, and usable if it is valid and both log-probs are finite. Means over tokens are over usable
tokens, means over sequences over sequences with a usable token. log r is clamped at +-20 inside exp, nowhere else.
Segment-wise weights w_t bound pi_{v+1}(y_t) / mu(y_t), and leave r_t as defined here. A metric that cannot be known,
such as a mean of nothing, is not reported.
"""

WHEN_REPORTED = """\
The hook reports a step when the next one begins. Warnings (everything rejected, too little kept, products that
saturate, advantages that are no number, log-probs that are scaled, cut off or unlikely) go to the log of one rank.
Where Miles lost or replaced a rank (`--use-fault-tolerance`), each rank warns of its own part of that step, and its
metrics are not logged; nothing is raised but `on_all_rejected: raise`. Of a step that Miles repeats, the last attempt
alone is reported.

The last step of a run has no next one. One process reports it when it exits. Of many ranks

* a loop of your own calls `mis_plugins.mis.report_last_step(args)` on each when training is over;
* slime with `--update-weight-transport disk --update-weight-mode full` can do so after each rollout:
  `--custom-update-weight-post-write-path mis_plugins.mis.report_last_step` (read in its source, not run);
* Miles, and slime otherwise, do not log it: neither calls a hook on all ranks after the last step. (Miles's post-save
  hook is that of rank 0, and both call the hook of an update by deltas on rank 0 alone at first.) A rank that exits by
  itself warns of its own micro-batches, one that Ray ends by force does not. Where it counts, train one step more.
"""

WATCHED = ("kl_k3", "ppl_ratio", "kept_fraction", "ess", "saturated_tokens")
WATCH_FIRST = """\
A default log has these five, as `mis_k3_kl`, `mis_ppl_ratio`, `mis_kept_fraction`, `mis_ess_mb` and
`mis_saturated_fraction` of the hook, and exactly, of the step, as below. [choose.md](choose.md) says when to act.
"""

FIRST = {
    "How much there was": "tokens",
    "How far the two policies are apart, token by token": "kl_k1",
    "Whether both sides mean the same by a log-prob: see `metrics/slope.py`": "slope",
    "How far the two policies are apart, sequence by sequence": "train_log_ppl",
    "The weights": "weight_mean",
    "What was rejected": "kept_fraction",
    "What OPSM compares and masks, reported where OPSM is on": "opsm_divergence_mean",
    "The loss": "loss_uncorrected",
    "Percentiles": "ratio_p{percent}",
    "Tails": "log_ratio_tail_{side}_{bound}",
    "Each rule": "rule_{i}_mean",
    "Weight versions": "lag_{age}_share",
    "Turns of a dialogue": "turn_{turn}_share",
    "Segment-wise weights": "behav_imp_weight/avg",
    "Routing of a mixture of experts": "route_differs",
    "Log ratios by routing": "route_tokens",
    "Trainer against itself": "resplit_differs",
}
"""Sections of the page by the first metric of each, in the order of `metrics.yaml`."""

INTRODUCED: dict[str, str] = {
    "Percentiles": (
        f"percent is one of {', '.join(map(str, QUANTILES))}. Percentiles come from histograms of logarithms, whose "
        f"counts add. A logarithm is off by at most {sketch.RELATIVE_ERROR:.0%} of itself, however the step is split. "
        "A ratio r is thereby off by a factor of at most r^0.01 or its inverse: 0.7% at 2 and at 1/2, 4.7% at 100. "
        "A percentile is interpolated between two values; if they lie on either side of 0, it may be off by more."
    ),
    "Tails": (
        f"side is high or low; bound is {' or '.join(map(str, LOG_RATIO_TAILS))} of a log ratio, "
        f"{', '.join(map(str, PROB_DIFF_TAILS))} of a difference of probabilities."
    ),
    "Each rule": (
        "i is the place of the rule in `mis.reject`, from 1. Each metric tells what the rule would drop, or "
        "down-weigh, alone. Values are those that the rule compares, for `statistic: ratio` the logarithm. A unit is a "
        "sequence, or a segment where the rule drops segments."
    ),
    "Weight versions": (
        f"age is trainer version minus the version that wrote the token, from 0 to {AGES - 1}. Metrics by age are "
        "reported where the versions are known."
    ),
    "Turns of a dialogue": (
        f"turn is 1 to {TURNS}. A turn of the model is a run of ones in the loss mask: it begins where the mask of a "
        "response rises from 0 to 1, wherever context parallelism cuts the response. What the rules reject begins no "
        "turn. Metrics by turn are reported in steps of which a response has two turns or more; elsewhere they "
        "would repeat those of all tokens. In the own loops of both hosts, on responses with two masked spans, they "
        "equal the oracle's (rows `*-turns` of [the table](../lab/results/in_host.md))."
    ),
    "Segment-wise weights": (
        "Metrics of segment-wise weights are reported where `mis.segment_wise` is on, unless `metrics` is `none`. A "
        "name without a suffix is of all tokens. `/age_0`, `/age_1` and so on are of the tokens of one age, "
        "`/age_16_up` of all older tokens, `/no_age` of tokens without a known version."
    ),
    "Routing of a mixture of experts": (
        "Metrics of routing are reported where `mis_plugins.mis.watch_routes` watches (see [routing.md](routing.md)), "
        "whatever `metrics` says, under the number of the step that begins. A name without a suffix is of all "
        "layers and positions, `/layer_3` of one layer (from 0), `/position_256` of the positions of a "
        "bucket that starts there."
    ),
    "Log ratios by routing": (
        "Each name ends in `/same`, `/other` or `/earlier`. A token is `other` where a layer by itself routes it to "
        "other experts than the engine did, `earlier` where this is so of a token before it in the sequence "
        "alone, else `same`."
    ),
    "Trainer against itself": (
        "With `mis: {resplit_every: 10}` the rollout-data hook (`count_samples`, or `normalize_rollout`) has the "
        "trainer compute the log-probs of every tenth rollout twice, at equal weights, from micro-batches that are "
        "cut otherwise: halved, or, where all hold one sample, joined by two, so that one may hold twice the tokens of "
        "`--max-tokens-per-gpu`. The second pass is the cost in one of "
        "ten rollouts, and the others pay nothing. The metrics are reported whatever `metrics` says, under the number "
        "of the rollout's first step. Where micro-batches are halved, a sample that was alone in its own is so again, "
        "and counts as equal. No hook of Miles and slime is handed the trainer: ours reads it from "
        "`train_actor`, which calls the hook (in `backends/megatron_utils/actor.py`, Miles 31f1ca96 line 564, slime "
        "624b824a line 506). Refused are a replay of routes, which is queued for one pass (Miles line 484, slime "
        "line 431); `--keep-old-actor`, whose weights are gone when the hook is called (lines 556 and 499); and "
        "Miles on FSDP, which calls no such hook. In the own loops of both hosts the rows `*-resplit` of "
        "[the table](../lab/results/in_host.md) differ nowhere; with a planted kernel whose rounding depends "
        "on the size of the micro-batch, 44% to 75% of the tokens do."
    ),
}

HOOK_MEANS = """\
A hook returns one value a token. The host takes their mean over all rollouts of the step, also over
those of which no token is valid, unless `--calculate-per-token-loss` makes it a mean over tokens. A hook
is called once a micro-batch, and is told of no other. The rollout-data hook sees the masks of a rollout before its
steps. There

```
--rollout-data-postprocess-path mis_plugins.mis.count_samples
```

(`normalize_rollout` does the same beside its own work) counts what trains of each step, over all ranks, and every name
that Miles's `mis.py` lacks is the mean over what trains, however the step is split. A rollout of several steps needs
`report_step` as well, which says which of them trains. Miles (31f1ca96) hands that hook `args` alone; ours reads
the batch from the trainer that calls it. Miles on FSDP calls no such hook. There, and without the flag, this is left:

* A name of Miles's `mis.py` has its meaning there, and is too low, with the flag too. The mean over the samples with a
  valid token is the number in the log divided by `live_sequences_fraction`, where every rollout is one sample.
* Names in the table, and `nonfinite_advantages` of the loss hook, are scaled back within their micro-batch. Each
  micro-batch then counts by its samples, masked ones included: equal to the mean over samples with a valid token if
  masked samples are spread evenly or the micro-batches are alike.
* A micro-batch without a valid token adds 0, whatever a hook returns, and lowers all names by its share of
  the samples.
* With a rollout or generate function of yours a rollout may be several samples, whose number no hook is told. Then
  nothing is scaled, and all names read too low.

The log says once that a step had such samples, with or without the step hook, whatever `metrics` is but `none`. The
right column is exact in all cases. With 4 of 16 samples removed, the reductions of both hosts give
[Miles's log](../lab/results/masked_samples_miles.md) and
[slime's](../lab/results/masked_samples_slime.md).
"""

VANISHED = """\
`metrics: watch`, the default, hands the host `mis_k3_kl`, `mis_ppl_ratio`, `mis_kept_fraction`, `mis_ess_mb` and
`mis_saturated_fraction`. The table says where each other name of `metrics: full` is now. A name without a number of
the step is in the log with `mis.metrics: full`.
"""

HEAD = "| metric | what | range | bad | do | elsewhere |\n|---|---|---|---|---|---|"


def document() -> str:
    parts = [INTRODUCTION, "## The five to watch\n", WATCH_FIRST, table(WATCHED)]
    parts += ["## How to read the tables\n", HOW_TO_READ]
    for title, names in sections().items():
        words = INTRODUCED.get(title)
        parts += [f"## {title}\n", *([] if words is None else [words + "\n"]), table(names)]
    parts += ["## When a step is reported\n", WHEN_REPORTED]
    parts += ["## Fully masked samples, and what the host logs of a hook\n", HOOK_MEANS, _hook_means()]
    parts += ["## What a default log no longer has\n", VANISHED, _vanished()]
    parts += ["## What other packages call them\n", *_peers()]
    parts += ["## Log-probs processed on one side\n", inspect.cleandoc(slope.__doc__ or ""), SIMULATED]
    return "\n".join(parts)


def sections() -> dict[str, list[str]]:
    """The metrics of each section, in the order of `metrics.yaml`."""
    titles = {name: title for title, name in FIRST.items()}
    found: dict[str, list[str]] = {}
    for name in WORDS:
        if name in titles:
            found[titles[name]] = names = []
        names.append(name)
    return found


def table(names: Iterable[str]) -> str:
    rows = [" | ".join([f"`{name}`", *cells_of(name), _elsewhere(name)]) for name in names]
    return "\n".join([HEAD, *(f"| {row} |" for row in rows)]) + "\n"


def cells_of(name: str) -> list[str]:
    """Words of a metric in the order of the columns of `HEAD`."""
    said = WORDS[name]
    return [said[column].replace("|", "\\|") for column in ("what", "range", "bad", "do")]


def _elsewhere(name: str) -> str:
    found = (
        f"{peer}: {', '.join(f'`{theirs}`' for theirs, ours in names.items() if ours == name)}"
        for peer, names in PEERS.items()
        if name in names.values()
    )
    return "; ".join(found)


def _hook_means() -> str:
    rows = (f"| `{name}` | {words} |" for name, words in BY_STEP.items())
    return "\n".join(["| the hook's | exact, of the step |", "|---|---|", *rows]) + "\n"


def _vanished() -> str:
    rows = (f"| `{name}` | {words} |" for name, words in SAID["vanished"].items())
    return "\n".join([f"| in the log before | now under `{PREFIX}` |", "|---|---|", *rows]) + "\n"


def _peers() -> Iterator[str]:
    yield (
        "The last column of the tables above names equal metrics elsewhere; `tests/peers/test_peers.py` calls the\n"
        "packages and compares. The table here lists names that mean something else, or have no metric of ours:\n"
    )
    rows = [
        f"| {peer} | {theirs} | {words} |"
        for peer, names in OTHERWISE.items()
        for theirs, words in names.items()
    ]
    yield "\n".join(["| package | theirs | ours |", "|---|---|---|", *rows]) + "\n"


def main() -> int:
    """Print the page."""
    parser_of(__doc__).parse_args()
    print(document(), end="")
    return 0
