"""The module recorder writes what every module of a model receives and returns, named as in SGLang's dumps.

    with record(model, folder) as recorder:
        logits = model(input_ids).logits
        recorder.log_probs(LogProbRecord.from_sequences(tokens, log_probs))

Then `python -m true_on_policy diff A B` finds the first operation whose bytes differ between two recordings.
A recording is a folder that `record` wrote, or the engine's own dump.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.files import replaced
from true_on_policy.diff.log_prob_record import LogProbRecord
from true_on_policy.diff.records import LOG_PROBS, NON_INTRUSIVE

# Modules that return their input. Megatron puts them where a model has no norm; other frameworks have no
# module there.
PLACEHOLDERS = ("Identity", "IdentityOp", "IdentityFuncOp")
LAYER = re.compile(r"(?:.+\.)?layers\.(\d+)")


@contextmanager
def record(
    model: nn.Module, folder: Path | str, select: Callable[[Tensor], Tensor] | None = None
) -> "Iterator[Recorder]":
    """Record each call of each module of `model` into `folder` while the block runs.

    Each tensor is copied to the CPU and written to its own file at once, which is too slow for training. The
    hooks are removed when the block ends, even by an exception. A module inside `torch.compile` or a CUDA
    graph runs no hooks.

    Args:
        select: returns the part of each tensor to write. `lambda x: x[:1]` writes the first sequence of a
            batch, to compare the sequence in a batch with the sequence alone.

    Raises:
        RecordError: `folder` holds a recording of this rank already; two recordings would be read as one.
    """
    recorder, wrappers, inner = Recorder(Path(folder), select or (lambda x: x)), [], model
    while [*inner._modules] == ["module"]:  # Megatron's DDP and Float16Module take arguments without names
        wrappers, inner = [*wrappers, inner], inner.get_submodule("module")
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if type(module).__name__ in PLACEHOLDERS:
                continue
            if match := LAYER.fullmatch(name):
                # Megatron's layer_number counts from 1 over all pipeline stages.
                layer = getattr(module, "layer_number", int(match[1]) + 1) - 1
                hooks.callback(module.register_forward_pre_hook(recorder.entering(layer)).remove)
            inputs = recorder.inputs_of_model(inner) if module is inner else recorder.inputs_of(name)
            if module not in wrappers:
                hooks.callback(module.register_forward_pre_hook(inputs, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(recorder.output_of(name)).remove)
            if match:
                hooks.callback(module.register_forward_hook(recorder.entering(None), always_call=True).remove)
        yield recorder


@dataclass
class Recorder:
    """The module recorder of one rank counts, names and writes values in their order of execution."""

    folder: Path
    select: Callable[[Tensor], Tensor]
    rank: int = field(default_factory=lambda: _rank())
    dump_index: int = 0
    layer: int | None = None

    def __post_init__(self):
        # Ranks share a folder, and another rank may have written already.
        if any(self.folder.glob(f"*rank={self.rank}___dump_index=*")):
            raise RecordError(f"{self.folder}: holds a recording already; name another folder")

    def write(self, name: str, value: Tensor) -> None:
        """Write one value under a name; the value may be one that no module returns."""
        value = self.select(value.detach()).cpu().clone(memory_format=torch.contiguous_format)
        path, meta = self._next(name, ".pt")
        with replaced(path) as partial:
            torch.save({"value": value, "meta": meta}, partial)

    def log_probs(self, record: LogProbRecord) -> None:
        """Write the log-probs of the sampled tokens as a log-prob record."""
        record.save(self._next(LOG_PROBS, ".safetensors")[0])

    def entering(self, layer: int | None):
        return lambda *_: setattr(self, "layer", layer)

    def inputs_of(self, module_name: str):
        return lambda _, args, kwargs: self._write_all(module_name, "inputs", {**dict(enumerate(args)), **kwargs})

    def inputs_of_model(self, model: nn.Module):
        """Record the model's own inputs under the names of its arguments (`input_ids`), as in SGLang's dumps."""
        signature = inspect.signature(model.forward)

        def hook(_: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
            for key, value in _tensors(signature.bind_partial(*args, **kwargs).arguments):
                self.write(key, value)

        return hook

    def output_of(self, module_name: str):
        return lambda _, __, output: self._write_all(module_name, "output", output)

    def _write_all(self, module_name: str, side: str, value: Any) -> None:
        for key, tensor in _tensors(value):
            self.write(NON_INTRUSIVE + ".".join(filter(None, (module_name, side, key))), tensor)

    def _next(self, name: str, suffix: str) -> tuple[Path, dict[str, Any]]:
        self.dump_index += 1
        tags = {"step": 0, "rank": self.rank, "dump_index": self.dump_index, "name": name}
        if torch._C._current_graph_task_id() != -1:  # a forward inside a backward recomputes activations
            tags |= {"recompute_status": "recompute"}
        tags |= {} if self.layer is None else {"layer_id": self.layer}
        return self.folder / ("___".join(f"{tag}={value}" for tag, value in tags.items()) + suffix), tags


def _tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a module's arguments or result, each with its key.

    The key is empty for a tensor by itself, and for the only tensor in a tuple or list.
    """
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items() if isinstance(item, Tensor))
    elif isinstance(value, tuple | list):
        tensors = [item for item in value if isinstance(item, Tensor)]
        yield from ((str(index) if len(tensors) > 1 else "", item) for index, item in enumerate(tensors))


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
