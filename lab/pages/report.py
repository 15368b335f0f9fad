# ruff: noqa: E501  (rows of a page's tables)
"""The page `docs/report.md`: how to read a run, the neutral form, and every cause with its fix.

python -m lab.pages.report > docs/report.md
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.pages.report:main")

import json
import math
from collections.abc import Iterator
from pathlib import Path

from lab.provenance import parser_of
from mis_plugins.explain.limits import LIMITS, Limits
from mis_plugins.explain.rungs import record
from mis_plugins.report.causes import CANNOT, CAUSES, Cause
from mis_plugins.report.places import PLACES
from mis_plugins.shared.budget import BUDGETS, MEGABYTE

# The bound on resident memory that the page states: bytes, and times the file of the largest rollout.
MEMORY_BESIDE, MEMORY_TIMES = 10**9, 2
RESULTS = Path(__file__).parents[1] / "results"
SCORES = """All causes are scored on one measure: the share of the mismatch that each accounts for. A token adds
e^-|log r| - 1 + |log r| to it, which is the k3 of a ratio below 1 on either side, so that no single token outweighs a run.
The largest share comes first. A sign that low precision brings about too counts from a share of 6% on. Beside the
evidence the page says what speaks against each cause: what it leaves unexplained, and what its rival accounts for, or that
no other sign shows.

The verdict is an alarm at any cause but the engine's precision, or at a kl_k3 above 5e-2; a warning beyond any limit
above, where more than a tenth of the records was rejected, a file broke off, or fewer than 100 tokens can be compared;
else calm.
"""
INTRODUCTION = """# See the mismatch of a run

<!-- Made by `python -m lab.pages.report`: change what mis_plugins/report/ says instead. -->

For whoever asks why a run collapsed, since when, and which config would have helped. One command reads what the run
left and writes `report.html` (one file, no network, no script) and `report.json`, and prints a summary.

```
pip install '.[report]'    # in a clone of the repository
python -m mis_plugins report DUMPS
python -m mis_plugins report DUMPS --config mis --sweep all --output report
python -m mis_plugins report DUMPS --watch
python -m mis_plugins config suggest DUMPS > mis.yaml
```

![First screen of the page of a made-up run: verdict, since when, what to do, numbers, causes](report-1280-light.png)

The page begins with the verdict, since when, and what to do, which a [phone](report-390-light.png) shows at once; it
follows the system into [dark](report-1280-dark.png), on a [phone](report-390-dark.png) too. `python -m
lab.report_pictures docs/report` takes these pictures.

`--config` names what the run was corrected with: the step metrics are then those that `metrics: all` logged.
`--sweep` takes `own` (the presets of this pack), `all`, `none`, or presets and files with commas between them. To
compare two runs, report each, and hold one `report.json` beside the other. `--watch` reads again every `--every` seconds, and exits with code
3 at the first cause, alarm or number beyond its limit. Ctrl-C writes what was read before and exits with code 130.
SIGTERM leaves the earlier report as it was, and ends with 143. `report.html` and `report.json` are always of one run: a
kill in the midst of their move, which takes microseconds, leaves files of one run alone, and the next report ends the
move.

Exit code 0 says that the mismatch was measured. Tokens with two finite log-probs
were read, or curves of a number that has a limit. A `kl_k3` of -5, or of NaN alone, measures nothing. Else the exit
code is 2, the verdict says that nothing was read or measured, and the table of what was not read says why: the keys that
were found, and the nearest spelling of each that is missing. `--watch`
reads on where nothing was read yet; Ctrl-C then ends it with code 2.

## What is read

| what | how | which releases were read |
|---|---|---|
| Miles | `--dump-details` or `--save-debug-train-data`, all ranks: context-parallel pieces are joined, copies and stages without log-probs understood; versions of single tokens where `convert_with_versions` of this pack carries them | 31f1ca9 |
| slime | `--dump-details` or `--save-debug-train-data`; `--save-debug-rollout-data` beside it adds rewards, versions and what was cut | 624b824 |
| neutral form | jsonl (also packed, `.gz` or `.zst`) or parquet, below | |
| curves | `metrics.jsonl` of the embedded host, offline wandb runs, tensorboard files: the gradient norm, the reward and the length of responses over the steps, beside the numbers of the tokens; without tokens no causes | |
| verl | its `rollout_data_dir` holds texts and scores, and no log-probs: write the neutral form | 0.4.1 to 0.7.0, 0.8.0.dev b178a3c |

A host's dump is one rollout, which counts as one step here; a rollout of several optimizer steps is reported whole.
Numbers are means over tokens, as `metrics: all` logs them. Dumps are untrusted: no class that a file names is imported,
and nothing that it asks for is called. A broken file or line is named, and the rest is read; see "What a file may cost".

**Text.** The worst sequences show prompt and response where the dump has them: Miles's and slime's rollout dumps have
both. Single tokens show their text where the neutral form gives it, and where a `tokenizer.json` or `tokenizer/tokenizer.json`
lies beside the dumps or above them, as in `--dump-details` of both hosts; elsewhere copy the checkpoint's file there. No code of a checkpoint
is run.

**The run's own config.** `--config` names it; else it is read from an offline wandb run, or the embedded host's
`summary.json`, among the paths. "What was read" says which it was.

**A host's own log.** Miles and slime divide what the TIS hook returns by responses, and not by tokens: a short response
counts as much as a long one, and their numbers differ from those above where lengths differ.

**Memory.** By count at most 1 GB, and twice the file of the largest rollout: a host's dump is mapped, and the responses
of one rollout are joined at a time; a jsonl is read a line at a time, parquet 64 rows at a time. What stays is 0.1 MB for
each of the last eight steps, some 10 kB for each step before, 6 numbers for each token id, 33 numbers for each
sequence, and the twelve worst sequences. `lab/results/report_memory.md` has one run over 10 GB: a peak of 0.61 GB
against 1.10 GB.

## The neutral form

One JSON object a line, or one parquet row, for each sequence. Lists are as long as the response.

| key | what |
|---|---|
| `behavior_log_probs`, `proximal_log_probs` | needed: log mu of the rollout engine, log pi_old of the trainer; `null` where unknown |
| `loss_mask` | 1 where a token enters the loss; missing: everywhere |
| `step`, `sample` | a whole number (missing: 0), and a name |
| `tokens`, `text` | ids, and the text of each token, or of the whole response |
| `prompt` | the prompt's text |
| `advantages`, `reward` | of each token, and of the response |
| `versions`, `trainer_version` | version that wrote each token, and version of the trainer; without the latter the newest token has age 0 |
| `turns` | number of the turn of each token |
| `route_differs` | 1 where trainer and engine chose other experts |
| `truncated` | true where the response ran into a limit |

From a batch of verl, for example, in `fit` of `ray_trainer.py` right behind the trainer's own log-probs
(`_compute_old_log_prob`). Later its rejection takes tokens out of `response_mask`. With `bypass_mode: true`, `old_log_probs`
are the engine's own, which hides every mismatch.

```python
import json

with open("run.jsonl", "a") as file:
    for row, mask in enumerate(batch.batch["response_mask"].bool()):
        columns = {"behavior_log_probs": "rollout_log_probs", "proximal_log_probs": "old_log_probs"}
        line = {ours: batch.batch[theirs][row][mask].tolist() for ours, theirs in columns.items()}
        file.write(json.dumps({"step": global_step, "sample": row} | line) + "\\n")
```
"""

COSTS = """## What a file may cost

Files come from strangers. A record that is broken is left out, and a file that asks for more than the table below is
left out from there on. The terminal, the page and `problems` in `report.json` name file, place and reason. Only
regular files are read: a pipe, a device or a link to a folder is told and left out. A step is a whole number from 0 to
2^53; 3.0 counts as 3. A response whose log-probs have a mean above 0 is left out: they are none.
"""
CONFIGS = """## What would have happened

Every config of `--sweep` is applied to the same tokens by the functions of the training path, in one pass. The mean
weight of a normalization is that of the batch at hand, whatever its scope. A candidate is out where it keeps less than
half of the tokens, has an effective sample below one tenth (noise averages out over steps, and a wrong direction adds
up), a mean weight outside 0.25 to 1.25, keeps less than 80% of one usual length of what it keeps of another (5% of the
tokens or more), or keeps 5 points more of one sign of advantages. The rest is ranked by a cosine over tokens, between w A (1 - p) and v A (1 - p): w is the config's weight, A
the advantage, p the trainer's probability of the token, and 1 - p about the size of its score. The weights v stand for
what an unbiased gradient would have. Where 32 responses or more of a batch have products of ratios with an effective
sample of one quarter, v is that product (`response_cosine`, over such batches); else v is the token's ratio
(`coefficient_cosine`), which says nothing of products over responses. `lab/results/report_collapse.md` holds both
against the true cosine, and runs a proposal where the run before collapsed and a control with matched precision held.
On two such seeds that nobody had seen before, the proposal, `sequence` each time, held on both. Of three in
sight when the rules were set it held on two; on seed 10 it sank from .96 to .55 with an engine in int4. With int3 it fell there,
as did seven of eight other presets; the eighth dropped 99% of the tokens. No ranking would have helped. Without advantages
the effective sample size ranks.

**What is proposed.** README's row for the run's kl_k3 and length. Without advantages nothing can be ranked by gradient:
the row stands, and the column `advantages` would let the report do more. With them another config takes the row's place
only where its cosine is above the row's by more than 0.005 and two standard errors of the difference, over 16 parts of
the responses of which each is left out in turn; both figures are shown. Configs within that interval are named as
equals, `tis` first. Nothing is proposed for a calm run. Above README's last row (kl_k3 of 0.25) docs/choose.md says to
repair the engine first, and so does the report, with the config to try afterwards.

**Where no config is trusted.** None is where kl_k3 of the run, or of the first tenth of its steps, is above 0.25.
A run that starts anew with another config meets the same opening. Lower the mismatch, and report again.
`lab/results/report_collapse.md` and `lab/results/collapse-search.md` have toy runs that no config saved.
"""


def main() -> int:
    """Print the page."""
    parser_of(__doc__).parse_args()
    print("\n".join(_page()))
    return 0


def _page() -> Iterator[str]:
    yield INTRODUCTION
    yield from _costs()
    yield "\n## Where\n\n| table | buckets |\n|---|---|"
    yield from (f"| {name} | {place.what} |" for name, place in PLACES.items())
    yield "\n## How large\n\nA number beyond its limit is told, as `docs/metrics.md` calls it bad:\n"
    yield "| number | limit |\n|---|---|"
    yield from (f"| `{name}` | {_limit(limits)} |" for name, limits in LIMITS.items())
    yield from _ladder()
    yield f"\n{CONFIGS}\n# Causes\n"
    yield SCORES
    yield f"{_measured()}\n"
    for name, cause in CAUSES.items():
        yield from _cause(name, cause)
    yield f"# What it cannot tell\n\n{CANNOT}"


def _measured() -> str:
    """The summary of the record of planted and clean runs."""
    held = json.loads((RESULTS / "report_causes.json").read_text(encoding="utf-8"))
    return f"`lab/results/report_causes.md` (`python -m lab.report_causes`): {held['summary']}"


def _costs() -> Iterator[str]:
    """The budgets of reading."""
    yield COSTS
    yield "| what | any file may ask for | and for each MB of it | else |\n|---|---|---|---|"
    for one in BUDGETS:
        more = f"{one.per_byte * MEGABYTE:,.0f}" if one.per_byte else "none"
        yield f"| {one.what} | {one.base:,.0f} | {more} | {one.why} |"


def _ladder() -> Iterator[str]:
    """The rungs of the real model."""
    measured = record()
    yield (
        f"\n{measured.model}: real SGLang on CPU at temperature 1, against Megatron-core in bf16; linear layers rounded to "
        "nearest\n(`lab/mismatch.py`). The ladder gives the order of magnitude, and numbers of other models differ. "
        "In\n`lab/results/report_rungs.md` each turn of 32 chats alone is held to the ladder.\n"
    )
    yield "| engine | prompts | tokens | kl_k3 | p99 of abs log r |\n|---|---|---|---|---|"
    for rung in measured.steps:
        yield f"| {rung.words} | {rung.prompts} | {rung.tokens} | {rung.k3:.2g} | {rung.p99:.2g} |"


def _limit(limits: Limits) -> str:
    words = (f"below {limits.low:g}", f"above {limits.high:g}")
    alarm = "" if math.isinf(limits.alarm) else f"; an alarm above {limits.alarm:g}"
    return " or ".join(one for one in words if "inf" not in one) + alarm


def _cause(name: str, cause: Cause) -> Iterator[str]:
    yield f"## {name}\n\n**{cause.title}.** {cause.symptom}\n"
    yield f"* Cause: {cause.cause}\n* Fix: {cause.fix}\n* Threshold: {cause.threshold}"
    if cause.explains:
        yield f"* Where it shows, these are not told apart from it: {', '.join(sorted(cause.explains))}."
    yield ""
