"""Numbers of a report equal the host's own log: records of the hosts' real loops, written again as dumps and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from report_dumps import write_miles, write_slime
from test_readers import read, some_records
from test_report import surveyed

from lab.records import records
from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.report.logged import OF_HOST
from mis_plugins.report.record import Record
from mis_plugins.report.survey import Report

# A planted fault of routes stops its run before the first step.
ARCHIVE = Path(__file__).parents[2] / "lab/results/in_host.tar.xz"
RECORDS = {name: record for name, record in records(ARCHIVE).items() if record["steps"]}
# Hosts add up float32 over a few hundred tokens, and log-perplexities of about 5. Figures of `mis_step` are float64,
# but for a spread, which is the root of a difference of squares.
RELATIVE, ABSOLUTE = 2e-6, 2e-6
SPREAD = 1e-4
OF_WEIGHTS = frozenset(
    """mis_tis_truncate_fraction mis_tis_weight_before_bound mis_tis_weight_after_bound mis_ess_mb mis_weight_min_mb
    mis_weight_max_mb mis_is_ratio_mean_final mis_is_ratio_min_final mis_is_ratio_max_final
    mis_is_ratio_mean_after_tis_rs""".split()
)


def recorded(record: dict[str, Any]) -> tuple[dict[str, float], list[Record], list[list[int]]]:
    """What the host logged for a record's recorded step, and the responses by micro-batch."""
    rows = [row for batch in record["micro_batches"] for row in batch]
    responses = [
        Record(
            1,
            str(place),
            torch.tensor(row["behavior"]),
            torch.tensor(row["proximal"]),
            torch.tensor(row["mask"]),
            torch.arange(len(row["mask"])),
            advantages=torch.tensor(row["advantages"]),
        )
        for place, row in enumerate(rows)
    ]
    ends = torch.tensor([len(batch) for batch in record["micro_batches"]]).cumsum(0).tolist()
    micro_batches = [[*range(low, high)] for low, high in zip([0, *ends], ends, strict=False)]
    number = record.get("recorded", len(record["steps"]) - 1)
    return record["steps"][number]["metrics"], responses, micro_batches


def reported(folder: Path, record: dict[str, Any]) -> tuple[Report, dict[str, float]]:
    told, responses, micro_batches = recorded(record)
    write = write_miles if record["host"] == "miles" else write_slime
    write(folder, responses, micro_batches=micro_batches)
    found, problems = read(folder)
    assert not problems and len(found) == len(responses)
    return surveyed(found, reading.from_mapping(record["config"])), told


@pytest.mark.parametrize("name", RECORDS)
def test_every_number_is_the_hosts_own(tmp_path: Path, name: str) -> None:
    """Means over responses, numbers of micro-batches and normalized weights, as Miles and slime logged them."""
    record = RECORDS[name]
    report, told = reported(tmp_path, record)
    (found,) = report.logged
    names = {name for name in found if f"train/{name}" in told and name.startswith(("mis_", "train_"))}
    assert len(names) >= 10 and "train_rollout_logprob_abs_diff" in names
    if not record.get("micro_batched", True):  # docs/report.md says which numbers are others there
        names = {name for name in names if not name.endswith("_mb")} - {OF_HOST}
    if record["loss"] in ("segment_wise", "next"):
        names -= OF_WEIGHTS
    wanted = {name: told[f"train/{name}"] for name in names}
    assert {name: found[name] for name in names} == pytest.approx(wanted, rel=RELATIVE, abs=ABSOLUTE)


def test_the_exact_metrics_are_those_of_the_run() -> None:
    record = RECORDS["miles-report-step"]
    told, responses, _ = recorded(record)
    found = surveyed(responses, reading.from_mapping(record["config"])).steps[1]
    wanted = {name: value for name in found if (value := told.get(f"train/mis_step/{name}")) is not None}
    assert len(wanted) >= 40
    for name, value in wanted.items():
        bound = SPREAD if name.endswith(("std", "correlation")) else 1e-6
        assert found[name] == pytest.approx(value, rel=bound, abs=bound), name


def test_a_dump_without_micro_batches_has_no_numbers_of_a_host(tmp_path: Path) -> None:
    write_slime(tmp_path, some_records())
    assert surveyed(read(tmp_path)[0]).logged == []


def test_the_dashboards_mean_leaves_masked_responses_out(tmp_path: Path) -> None:
    """Miles's dashboard averages over responses with a valid token; the host divides by all."""
    records = some_records(lengths=(7, 20, 30, 5))
    records[1].loss_mask.zero_()
    write_miles(tmp_path, records, micro_batches=[[0, 2], [1, 3]])
    (found,) = surveyed(read(tmp_path)[0], CorrectionConfig()).logged
    sizes = [(one.proximal_log_probs - one.behavior_log_probs).abs()[one.loss_mask] for one in records]
    means = [float(size.mean()) for size in sizes if size.numel()]
    assert found["mean_abs_lp_diff"] == pytest.approx(sum(means) / 3, rel=1e-6)
    assert found["train_rollout_logprob_abs_diff"] == pytest.approx(sum(means) / 4, rel=1e-6)
