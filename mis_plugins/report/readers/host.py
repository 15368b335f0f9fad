"""What dumps of Miles and slime have in common: one response's columns, and what the rollout's own dump adds."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from mis_plugins.errors import LARGEST, shown
from mis_plugins.report.record import REQUIRED, Record, from_mapping, lacking
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.foreign import tensor_of
from mis_plugins.versions.spans import from_run_lengths

# What a host calls the columns of the neutral form.
NAMES = {
    "behavior_log_probs": "rollout_log_probs",
    "proximal_log_probs": "log_probs",
    "loss_mask": "loss_masks",
    "advantages": "advantages",
}

SIDES = "the engine's are rollout_log_probs, and log_probs the trainer's, recomputed before training"

# What is read of a sample; a dump may hold gigabytes of experts' routes beside it.
BESIDE = {"tokens", "raw_reward", "reward", "rewards", "truncated", "prompt", "response", "weight_versions"}
READ = {*NAMES.values(), *BESIDE}

# What is read as it stands of a sample in the rollout's own dump.
OF_ROLLOUT = ("reward", "weight_versions", "rollout_log_probs", "prompt", "response")

# What the rollout's dump tells of its samples, by index. Samples may share an index: copies of one prompt do.
Extra = Mapping[Any, Sequence[Mapping[str, Any]]]


def rollout_id(content: Mapping[str, Any]) -> int:
    """The number of the rollout of a dump; raises RecordError where the dump names no number."""
    given = content.get("rollout_id")
    number = int(given) if isinstance(given, str) and given.isdecimal() and len(given) < 19 else given
    if type(number) is not int or abs(number) > LARGEST:
        raise RecordError(f"rollout_id: got {shown(given)}; expected the number of a rollout")
    return number


def rollout_extra(content: Mapping[str, Any]) -> Extra:
    """What a rollout's dump (`--save-debug-rollout-data`) tells of its samples, by index."""
    by_index: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for place, sample in enumerate(content["samples"]):
        if not isinstance(sample, dict):
            continue
        index = sample.get("index")
        columns = {name: tensor_of(sample.get(name)) for name in OF_ROLLOUT}
        columns["tokens"] = _digest(sample.get("tokens"))
        columns["truncated"] = {"truncated": True, "completed": False}.get(str(sample.get("status")))
        by_index[place if index is None else index].append(columns)
    return by_index


def _told(extra: Extra, index: Any, sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the rollout's dump tells of one sample: all that its samples with equal index and tokens agree on."""
    tokens = _digest(sample.get("tokens"))
    alike = [row for row in extra.get(index, ()) if None in (tokens, row["tokens"]) or row["tokens"] == tokens]
    first, *others = alike or [{}]
    return {name: value for name, value in first.items() if all(_equal(value, other[name]) for other in others)}


def _digest(tokens: Any) -> bytes | None:
    if tokens is None:
        return None
    return blake2b(torch.as_tensor(tensor_of(tokens)).long().numpy().tobytes()).digest()


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def record(sample: Mapping[str, Any], rollout_id: int, index: Any, extra: Extra, columns: Iterable[Any] = ()) -> Record:
    """A record of one response from the columns of a host, whose file has more `columns` by name."""
    sample = {name: tensor_of(value) for name, value in sample.items() if name in READ}
    beside = _told(extra, index, sample)
    values = {name: sample.get(theirs) for name, theirs in NAMES.items()}
    if values["behavior_log_probs"] is None:
        values["behavior_log_probs"] = beside.get("rollout_log_probs")
    needed = {NAMES[name]: values[name] for name in REQUIRED}
    if any(value is None for value in needed.values()):
        others = [name for name in columns if isinstance(name, str) and name not in needed]
        held = [name for name, value in needed.items() if value is not None]
        raise RecordError(f"sample {index}: {lacking([*needed], held + others)}; {SIDES}")
    size = len(values["proximal_log_probs"])  # pyright: ignore[reportArgumentType]
    truncated = sample.get("truncated")
    values["tokens"] = _end_of(sample.get("tokens"), size, index)
    values |= {
        "reward": _first(sample, beside, ("raw_reward", "reward", "rewards")),
        "truncated": beside.get("truncated") if truncated is None else bool(truncated),
        "prompt": _first(sample, beside, ("prompt",)),
        "text": _first(sample, beside, ("response",)),
    }
    # The training data come first: only they can hold the versions of single tokens.
    versions = _versions(sample.get("weight_versions"), size) or _versions(beside.get("weight_versions"), size)
    return from_mapping(values | versions, rollout_id, str(index))


def _first(sample: Mapping[str, Any], beside: Mapping[str, Any], names: Sequence[str]) -> Any:
    given = (columns.get(name) for columns in (beside, sample) for name in names)
    return next((value for value in given if value is not None), None)


def _end_of(tokens: Any, size: int, index: Any) -> Tensor | None:
    """Ids of the response, which end the sample's tokens."""
    if tokens is None:
        return None
    ids = torch.as_tensor(tokens).reshape(-1)
    if ids.numel() < size:
        raise RecordError(f"sample {index}: tokens has {ids.numel()} values, fewer than log_probs, which has {size}")
    return ids[ids.numel() - size :]


def _versions(versions: Any, size: int) -> dict[str, Any]:
    """Version of each token.

    Hosts list one version a generation call, as text: tokens have a known version where one wrote the whole
    response. `convert_with_versions` of this pack lists whole numbers: batch and number of the sample, then
    runs of its tokens.
    """
    held = list(versions or ())
    if len(held) > 3 and len(held) % 2 == 0 and all(type(value) is int for value in held):
        counts = held[3::2]
        fit = sum(counts) == size and min(counts) > 0
        return {"versions": torch.tensor(from_run_lengths(held[2:]))} if fit else {}
    numbers = {int(version) for version in held if str(version).isdecimal() and len(str(version)) < 19}
    return {"versions": torch.full((size,), numbers.pop())} if len(numbers) == 1 else {}
