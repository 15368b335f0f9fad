"""A log-prob record holds the log-probs that an engine sampled with or a trainer recomputed, in one file.

The file is in safetensors' format, written whole or not at all. Its header says what made the record. It
holds four tensors:

    tokens      int64    [T]     sampled tokens of all sequences, packed
    log_probs   floating [T]     the log-prob of each token; NaN says that the engine gave none
    versions    int64    [T]     version of the weights that sampled each token
    cu_seqlens  int64    [N+1]   where each sequence begins, and where the last ends

A log-prob that an engine did not give stays NaN, and a record that holds NaN, or a number that stands in for a log-prob
(mis_plugins/shared/absent.py), cannot be compared. `log_prob_records` makes records of a host's dump.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import index
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from mis_plugins.shared.absent import HIGHEST, LOWEST
from mis_plugins.shared.archive import Stored
from mis_plugins.shared.arrays import Safetensors, save_safetensors
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.foreign import tensor_of
from mis_plugins.shared.provenance import environment
from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.sides import packages

FORMAT = "true_on_policy.diff.log_prob_record.1"
TENSORS = ("tokens", "log_probs", "versions", "cu_seqlens")


@dataclass(frozen=True)
class LogProbRecord:
    """The log-probs of sampled tokens; the module's docstring describes each tensor.

    Raises:
        RecordError: the tensors do not fit together.
    """

    tokens: Int64[Tensor, "T"]
    log_probs: Float[Tensor, "T"]
    versions: Int64[Tensor, "T"]
    cu_seqlens: Int64[Tensor, "boundaries"]
    metadata: Mapping[str, str] = field(default_factory=dict)
    mask: Bool[Tensor, "T"] | None = None  # the tokens that a host trains on, as its dump says; it is not saved
    prompts: Sequence[Sequence[int]] = ()  # of the sequences in a host's dump; they are not saved

    def __post_init__(self):
        for name in ("tokens", "versions", "cu_seqlens"):
            if getattr(self, name).dtype != torch.int64:
                raise RecordError(f"{name}: got {getattr(self, name).dtype}; expected int64")
        if not self.log_probs.is_floating_point():
            raise RecordError(f"log_probs: got {self.log_probs.dtype}; expected floating point")
        lengths = {name: tuple(getattr(self, name).shape) for name in ("tokens", "log_probs", "versions")}
        if len(set(lengths.values())) > 1 or self.tokens.dim() != 1:
            raise RecordError(f"expected three tensors of one length; got {lengths}")
        ends = self.cu_seqlens.tolist() if self.cu_seqlens.dim() == 1 else []
        if not ends or ends[0] != 0 or ends[-1] != len(self.tokens) or sorted(ends) != ends:
            raise RecordError(
                f"cu_seqlens: expected to rise from 0 to {len(self.tokens)}, the number of tokens; got {ends}"
            )

    @classmethod
    def from_sequences(
        cls,
        tokens: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float | None]],
        versions: Sequence[Sequence[int]] | int = 0,
        metadata: Mapping[str, str] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "LogProbRecord":
        """Build a record from the lists of an engine's answer, with one list for each sequence.

        Args:
            log_probs: None stands for a token without a log-prob.
            versions: one version for each token, or one for all tokens.
            dtype: the dtype in which the engine computed.

        Raises:
            RecordError: the lists do not fit together, or `dtype` would round a number.
        """
        lengths = [len(sequence) for sequence in tokens]
        if isinstance(versions, int):
            versions = [[versions] * length for length in lengths]
        for name, column in (("log_probs", log_probs), ("versions", versions)):
            if (held := [len(sequence) for sequence in column]) != lengths:
                raise RecordError(f"{name}: sequences of {held} values for tokens of {lengths}")
        flat = [value for sequence in log_probs for value in sequence]
        return cls(
            tokens=torch.tensor([index(token) for sequence in tokens for token in sequence], dtype=torch.int64),
            log_probs=_exact(flat, dtype),
            versions=torch.tensor([index(each) for sequence in versions for each in sequence], dtype=torch.int64),
            cu_seqlens=torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0),
            metadata=metadata or {},
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in TENSORS}

    def save(self, path: Path) -> None:
        """Write the record to a file whose header holds the SHA-256 of each tensor."""
        hashes = {name: digest(tensor) for name, tensor in self.tensors.items()}
        header = {**self.metadata, "format": FORMAT, "sha256": json.dumps(hashes)}
        save_safetensors(Path(path), self.tensors, header)

    @classmethod
    def load(cls, path: Path) -> "LogProbRecord":
        """Read a record that `save` wrote.

        Raises:
            RecordError: the file is not a log-prob record, or a tensor has another SHA-256 than the header
                states.
        """
        file = Safetensors(Path(path))
        header = file.metadata
        if header.get("format") != FORMAT:
            raise RecordError(f"{path}: not a log-prob record (format {header.get('format')!r})")
        columns = [*map(file.tensor, TENSORS)]
        try:
            record = cls(*columns, metadata=header)
            hashes = dict(json.loads(header["sha256"]))
        except (RecordError, TypeError, KeyError, ValueError) as error:
            raise RecordError(f"{path}: {error}") from error
        for name in file.names:
            if name not in TENSORS or hashes.get(name) != digest(record.tensors[name]):
                raise RecordError(f"{path}: {name} is not what was written (no tensor of a record, or other SHA-256)")
        return record


def absent(log_probs: Float[Tensor, "T"]) -> Bool[Tensor, "T"]:
    """Whether a number is no log-prob of a sampled token: NaN, infinite, or out of bounds. It is equal to nothing."""
    widened = log_probs.float()  # numbers of 8 bits have no order
    return ~((widened > LOWEST) & (widened <= HIGHEST))


def provenance(contract: Contract | None = None) -> dict[str, str]:
    """Describe what made a record, for its header: versions, machine, threads, and the pinned contract."""
    contracts = {} if contract is None else {"contract": json.dumps(asdict(contract))}
    return {"environment": json.dumps(environment(packages())), **contracts}


def digest(x: Shaped[Tensor, "..."]) -> str:
    """Hash dtype, shape and bytes in row-major order by SHA-256."""
    sha256 = hashlib.sha256(f"{x.dtype}{list(x.shape)}".encode())
    sha256.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)  # without a copy
    return sha256.hexdigest()


def _exact(values: Sequence[float | None], dtype: torch.dtype) -> Float[Tensor, "T"]:
    given = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
    stored = given.to(dtype)
    rounded = (stored.to(torch.float64) != given) & ~given.isnan()
    if rounded.any():
        value = given[rounded][0].item()
        raise RecordError(f"log_probs: {value!r} is no {dtype}; store tensors, or pass the engine's dtype")
    return stored


LOG_PROBS_END = "log_probs"  # ends rollout_log_probs, log_probs, ref_log_probs and teacher_log_probs
# The name of the lengths in a trainer's columns, and in a rollout's sample.
LENGTHS = ("response_lengths", "response_length")
MASKS = ("loss_masks", "loss_mask")

Samples = Sequence[Mapping[str, Any]]


def host_samples(value: Any) -> Samples | None:
    """Return the samples of a host's dump; None where `value` is not a host's dump."""
    if not isinstance(value, dict):
        return None
    columns, samples = value.get("rollout_data"), value.get("samples")
    if isinstance(columns, dict) and isinstance(columns.get("tokens"), list | tuple | Tensor | Stored):
        return _rows(columns)
    are_samples = isinstance(samples, list) and all(
        isinstance(sample, dict) and "tokens" in sample for sample in samples
    )
    return samples if are_samples and samples else None


def _rows(columns: Mapping[str, Any]) -> Samples:
    """Turn columns into one dict a sample. A column of another length is an error where it is read."""
    names = [name for name in columns if name.endswith(LOG_PROBS_END) or name in ("tokens", *LENGTHS, *MASKS)]
    opened = {name: tensor_of(columns[name]) for name in names}
    count = len(opened["tokens"])
    per_sample = {
        name: column
        for name, column in {**columns, **opened}.items()
        if isinstance(column, list | tuple | Tensor) and len(column) == count
    }
    for name, column in opened.items():
        if column is not None and name not in per_sample:
            raise RecordError(f"{name}: not one entry for each of {count} samples")
    return [{name: column[number] for name, column in per_sample.items()} for number in range(count)]


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
    prompts, tokens = zip(*map(_split, samples), strict=True)
    given = [tensor_of(sample.get(name)) for sample in samples]
    log_probs = [
        [None] * len(response) if values is None else _plain(values)
        for values, response in zip(given, tokens, strict=True)
    ]
    dtypes = {values.dtype for values in given if isinstance(values, Tensor)} or {torch.float32}
    if len(dtypes) > 1:
        raise RecordError(f"{name}: of several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    try:
        record = LogProbRecord.from_sequences(tokens, log_probs, dtype=dtypes.pop())
        return replace(record, mask=_mask(samples, tokens), prompts=prompts)
    except RecordError as error:
        raise RecordError(f"{name}: {error}; a rank of context parallelism dumps its own part alone") from error


def _split(sample: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Split the tokens of a sample into its prompt and its response."""
    length = next((index(tensor_of(sample[name])) for name in LENGTHS if name in sample), None)
    if length is None:
        raise RecordError(f"a sample without {' or '.join(LENGTHS)}")
    tokens = _plain(sample["tokens"])
    if not 0 <= length <= len(tokens):
        raise RecordError(f"a sample of {len(tokens)} tokens, {length} of them in its response")
    return tokens[: len(tokens) - length], tokens[len(tokens) - length :]


def _mask(samples: Samples, responses: Sequence[Sequence[int]]) -> Tensor:
    """Return which tokens of the responses a host trains on: all of a sample without a mask."""
    given = [next((sample[name] for name in MASKS if sample.get(name) is not None), None) for sample in samples]
    masks = [[1] * len(tokens) if mask is None else _plain(mask) for mask, tokens in zip(given, responses, strict=True)]
    if [*map(len, masks)] != [*map(len, responses)]:
        raise RecordError(f"loss masks of {[*map(len, masks)]} values for responses of {[*map(len, responses)]} tokens")
    return torch.tensor([bool(value) for mask in masks for value in mask], dtype=torch.bool)


def _plain(values: Any) -> list:
    values = tensor_of(values)
    return values.tolist() if isinstance(values, Tensor) else list(values)
