"""Dumps of Miles and slime: which files are some, which belong together, and the records that they hold.

slime's training dump was read from slime 624b824: `{format_version: 2, rollout_id, rank, samples, dp_shards}`, one file
a rollout. The last pipeline stage of tensor-parallel rank 0 writes it, after context-parallel pieces are gathered.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mis_plugins.errors import shown
from mis_plugins.report.readers import host, miles
from mis_plugins.report.readers.files import Problems, Source
from mis_plugins.report.record import Record, lacking
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.foreign import load_foreign
from mis_plugins.shared.opened import natural


def dumps(files: Iterable[Path], problems: Problems) -> Iterator[Source]:
    """Sources of dumps of Miles and slime: training data joined over ranks, and what rollouts' dumps add to them."""
    trained: dict[tuple[str, str], dict[Path, str]] = defaultdict(dict)
    rolled: dict[str, list[Path]] = defaultdict(list)  # evaluations too: their numbers are those of rollouts
    for file in files:
        content = problems.read(partial(load_foreign, file), file)
        if content is None:
            problems.torn[str(file)] = None
            continue
        kind, rollout = problems.read(partial(_kind, content), file) or ("", "")
        if kind == "rollout":
            rolled[rollout].append(file)
        elif kind:
            trained[kind, rollout][file] = str(content.get("rank"))
    for (kind, rollout), parts in sorted(trained.items(), key=lambda item: natural(item[0][1])):
        both = (*parts, *rolled.get(rollout, ()))
        records = partial(_records, kind, [*parts], rolled.get(rollout, ()))
        yield Source(f"{kind} rollout {rollout}", both, records, _twice(parts))
    if rolled and not trained:
        problems.add(
            "a rollout's dump holds the engine's log-probs alone; name the folder of the training data too "
            "(--save-debug-train-data, --dump-details)",
            next(iter(rolled.values()))[0],
        )


def _twice(parts: Mapping[Path, str]) -> tuple[Path, ...]:
    """The folders, or else the files, of parts that one rank wrote, as where there are several runs."""
    ranks = Counter(parts.values())
    files = sorted((file for file in parts if ranks[parts[file]] > 1), key=lambda file: natural(parts[file]))
    folders = dict.fromkeys(file.parent for file in files)
    return tuple(folders if len(folders) > 1 else files)


def _kind(content: Any) -> tuple[str, str]:
    """Format of a loaded dump, and the name of its rollout."""
    if miles.is_train_dump(content):
        kind = "Miles"
    elif isinstance(content, dict) and isinstance(content.get("samples"), list) and "rollout_id" in content:
        trained = "dp_shards" in content or any(
            "log_probs" in sample for sample in content["samples"] if isinstance(sample, dict)
        )
        kind = "slime" if trained else "rollout"
    else:
        raise RecordError(f"no dump of training or rollout data by Miles or slime{_lacking(content)}")
    return kind, str(host.rollout_id(content))


def _lacking(content: Any) -> str:
    """What a dump lacks to be one of a host, in words."""
    if not isinstance(content, dict):
        return ""
    columns = content.get("rollout_data")
    if not isinstance(columns, dict):
        return f": {lacking(('rollout_id', 'samples'), content)}"
    held, needed = (columns, "response_lengths") if "rank" in content else (content, "rank")
    return f": {lacking((needed,), held)}"


def _records(kind: str, files: Sequence[Path], rollouts: Iterable[Path], problems: Problems) -> Iterator[Record]:
    extra: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for rollout in rollouts:
        added = problems.read(lambda rollout=rollout: host.rollout_extra(load_foreign(rollout)), rollout)
        for index, rows in (added or {}).items():
            extra[index] += rows
    loaded = [(file, problems.read(partial(load_foreign, file), file)) for file in files]
    whole = [(file, content) for file, content in loaded if content is not None]
    if kind == "Miles":
        yield from miles.records([content for _, content in whole], f"{files[0].parent}", extra, problems)
        return
    for file, content in whole:
        for place, sample in enumerate(content["samples"]):
            names = sample if isinstance(sample, dict) else {}
            index = names.get("sample_index", names.get("rollout_position", place))
            made = partial(_of_slime, content, sample, index, extra)
            if record := problems.read(made, file, f"sample {shown(index)}"):
                yield record


def _of_slime(content: Mapping[str, Any], sample: Any, index: Any, extra: host.Extra) -> Record:
    if not isinstance(sample, dict):
        raise RecordError(f"holds {type(sample).__name__}, no sample")
    return host.record(sample, host.rollout_id(content), index, extra, sample)
