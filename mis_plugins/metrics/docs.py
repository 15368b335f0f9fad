"""The page `docs/metrics.md`, made from the words of each metric.

python -m mis_plugins.metrics.docs > docs/metrics.md
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("mis_plugins.metrics.docs:main")

import inspect
from collections.abc import Iterator, Mapping

from mis_plugins.metrics import sketch, slope
from mis_plugins.metrics.catalogue import PERCENTILES, QUANTILES, RULES, SECTIONS, TAILS, VERSIONS
from mis_plugins.metrics.metric import PREFIX, STEP_KEY, Metric
from mis_plugins.metrics.partials import LAGS
from mis_plugins.metrics.peer_names import OTHERWISE, PEERS
from mis_plugins.metrics.rows import LOG_RATIO_TAILS, PROB_DIFF_TAILS
from mis_plugins.metrics.staleness import WEIGHT_METRICS

INTRODUCTION = f"""# Metrics of `metrics: all`

<!-- Made by `python -m mis_plugins.metrics.docs`: change what mis_plugins/metrics/catalogue.py and
     mis_plugins/metrics/staleness.py say of them instead. -->

What the TIS hook returns, a host averages over tokens or samples and over micro-batches; the README lists those
metrics. A maximum, a quantile, a correlation or an effective sample size is no such average. `mis.metrics: all` adds
the metrics of this page: one number an optimizer step, exact over micro-batches, data-parallel and context-parallel
ranks however the step is split (`tests/metrics/test_partials.py`).
They go to the host's tracking as `{PREFIX}NAME` beside its `{STEP_KEY}`. One line of the host's log has them too, with
or without wandb and tensorboard. They need

```
--custom-megatron-before-train-step-hook-path mis_plugins.mis.report_step
```

which reports a step when the next one begins. Warnings (everything rejected, too little kept, products that saturate,
advantages that are no number, log-probs that are scaled, cut off or unlikely) go to the log of one rank. Where Miles
lost or replaced a rank (`--use-fault-tolerance`), each rank warns of its own part of that step, and its metrics are not
logged; nothing is raised but `on_all_rejected: raise`. Of a step that Miles repeats, the last attempt alone is
reported.

The last step of a run has no next one. One process reports it when it exits. Of many ranks

* a loop of your own calls `mis_plugins.mis.report_last_step(args)` on each when training is over;
* slime with `--update-weight-transport disk --update-weight-mode full` can do so after each rollout:
  `--custom-update-weight-post-write-path mis_plugins.mis.report_last_step` (read in its source, not run);
* Miles, and slime otherwise, do not log it: neither calls a hook on all ranks after the last step. (Miles's post-save
  hook is that of rank 0, and both call the hook of an update by deltas on rank 0 alone at first.) A rank that exits by
  itself warns of its own micro-batches, one that Ray ends by force does not. Where it counts, train one step more.

The metrics `lag_...` and those of segment-wise weights need the version that wrote each token. The embedded host hands
the versions on; Miles and slime do not yet: see [async.md](async.md).

r_t = pi_old(y_t) / mu(y_t) is the ratio of a token, trainer over rollout engine; w_t is its bounded weight. A token is
valid in the loss mask, and usable if it is valid and both log-probs are finite. Means over tokens are over usable
tokens, means over sequences over sequences with a usable token. log r is clamped at +-20 inside exp, nowhere else.
Segment-wise weights w_t bound pi_{{v+1}}(y_t) / mu(y_t), and leave r_t as defined here. A metric that cannot be known,
such as a mean of nothing, is not reported.
"""

FAMILIES: dict[str, tuple[str, Mapping[str, Metric]]] = {
    "Percentiles": (
        f"percent is one of {', '.join(map(str, QUANTILES))}. Percentiles come from histograms of logarithms, whose "
        f"counts add. A logarithm is off by at most {sketch.RELATIVE_ERROR:.0%} of itself, however the step is split. "
        "A ratio r is thereby off by a factor of at most r^0.01 or its inverse: 0.7% at 2 and at 1/2, 4.7% at 100. "
        "A percentile is interpolated between two values; if they lie on either side of 0, it may be off by more.",
        PERCENTILES,
    ),
    "Tails": (
        f"side is high or low; bound is {' or '.join(map(str, LOG_RATIO_TAILS))} of a log ratio, "
        f"{', '.join(map(str, PROB_DIFF_TAILS))} of a difference of probabilities.",
        TAILS,
    ),
    "Each rule": (
        "i is the place of the rule in `mis.reject`, from 1. Each metric tells what the rule would drop alone. Values "
        "are those that the rule compares, for `statistic: ratio` the logarithm. A unit is a sequence, or a segment "
        "where the rule drops segments.",
        RULES,
    ),
    "Weight versions": (
        f"lag is the age of a token, trainer version minus token version, from 0 to {LAGS - 1}. These metrics are "
        "reported where the versions are known.",
        VERSIONS,
    ),
    "Segment-wise weights": (
        "These metrics are reported where `mis.segment_wise` is on, unless `metrics` is `none`. A name without a "
        "suffix is of all tokens. `/age_0`, `/age_1` and so on are of the tokens of one age, `/age_16_up` of all older "
        "tokens, `/no_age` of tokens without a known version.",
        WEIGHT_METRICS,
    ),
}

HEAD = "| metric | what | range | bad | do | elsewhere |\n|---|---|---|---|---|---|"


def document() -> str:
    parts = [INTRODUCTION]
    for title, metrics in SECTIONS.items():
        parts += [f"## {title}\n", table(metrics)]
    for title, (words, metrics) in FAMILIES.items():
        parts += [f"## {title}\n", words + "\n", table(metrics)]
    parts += ["## What other packages call them\n", *_peers()]
    parts += ["## Log-probs processed on one side\n", inspect.cleandoc(slope.__doc__ or "") + "\n"]
    return "\n".join(parts)


def table(metrics: Mapping[str, Metric]) -> str:
    rows = [
        " | ".join([f"`{name}`", *cells_of(metric), _elsewhere(name)]) for name, metric in metrics.items()
    ]
    return "\n".join([HEAD, *(f"| {row} |" for row in rows)]) + "\n"


def cells_of(metric: Metric) -> list[str]:
    """Words of a metric in the order of the columns of `HEAD`."""
    said = metric.what, metric.range, metric.bad, metric.do
    return [cell.replace("|", "\\|") for cell in said]


def _elsewhere(name: str) -> str:
    found = (
        f"{peer}: {', '.join(f'`{theirs}`' for theirs, ours in names.items() if ours == name)}"
        for peer, names in PEERS.items()
        if name in names.values()
    )
    return "; ".join(found)


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
    print(document(), end="")
    return 0
