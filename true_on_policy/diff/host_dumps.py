"""Read log-probs from the dumps of Miles and slime (--dump-details): of a rollout, or of a rank's training batch.

The token ids in a dump identify the samples whose log-probs it holds. Masks and rewards are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.foreign import tensor_of
from true_on_policy.diff.log_prob_record import LogProbRecord

LOG_PROBS_END = "log_probs"  # ends rollout_log_probs, log_probs, ref_log_probs and teacher_log_probs
# The name of the lengths in a trainer's columns, and in a rollout's sample.
LENGTHS = ("response_lengths", "response_length")

Samples = Sequence[Mapping[str, Any]]


def host_samples(value: Any) -> Samples | None:
    """Return the samples of a host's dump; None where `value` is not a host's dump."""
    if not isinstance(value, dict):
        return None
    columns, samples = value.get("rollout_data"), value.get("samples")
    if isinstance(columns, dict) and isinstance(columns.get("tokens"), list):
        return _rows(columns)
    known = isinstance(samples, list) and all(isinstance(one, dict) and "tokens" in one for one in samples)
    return samples if known and samples else None


def _rows(columns: Mapping[str, Any]) -> Samples:
    """Turn columns into one dict a sample; a column without a value for each sample is left out."""
    count = len(columns["tokens"])
    opened = {name: tensor_of(column) for name, column in columns.items() if name.endswith(LOG_PROBS_END)}
    per_sample = {
        name: column
        for name, column in {**columns, **opened}.items()
        if isinstance(column, list | tuple | Tensor) and len(column) == count
    }
    for name, column in opened.items():
        if column is not None and name not in per_sample:
            raise RecordError(f"{name}: not one entry for each of {count} samples")
    return [{name: column[index] for name, column in per_sample.items()} for index in range(count)]


def log_prob_records(samples: Samples) -> Iterator[tuple[str, LogProbRecord]]:
    """Yield (name, record) for each kind of log-probs that a sample holds.

    Raises:
        RecordError: no sample holds log-probs, their number is not the length of the response, or one name
            has several dtypes.
    """
    filled = {name for sample in samples for name, value in sample.items() if value is not None}
    names = [name for name in sorted(filled) if name.endswith(LOG_PROBS_END)]
    if not names:
        raise RecordError("a host's dump without log-probs; name that of a rank which computed some")
    for name in names:
        yield name, _record(name, samples)


def _record(name: str, samples: Samples) -> LogProbRecord:
    tokens = [_response(one) for one in samples]
    given = [tensor_of(one.get(name)) for one in samples]
    log_probs = [
        [None] * len(response) if values is None else _plain(values)
        for values, response in zip(given, tokens, strict=True)
    ]
    dtypes = {values.dtype for values in given if isinstance(values, Tensor)} or {torch.float32}
    if len(dtypes) > 1:
        raise RecordError(f"{name}: of several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    try:
        return LogProbRecord.from_sequences(tokens, log_probs, dtype=dtypes.pop())
    except RecordError as error:
        raise RecordError(
            f"{name}: {error}; a rank of context parallelism dumps its own part alone"
        ) from error


def _response(sample: Mapping[str, Any]) -> list[int]:
    """Return the tokens of the response, which end the sample's tokens."""
    length = next((int(tensor_of(sample[name])) for name in LENGTHS if name in sample), None)
    if length is None:
        raise RecordError(f"a sample without {' or '.join(LENGTHS)}")
    tokens = _plain(sample["tokens"])
    return tokens[len(tokens) - length :]


def _plain(values: Any) -> list:
    values = tensor_of(values)
    return values.tolist() if isinstance(values, Tensor) else list(values)
