"""Pin kernels in Miles's FSDP trainer by Ray's worker hook: Miles calls no hook before its model runs.

    ray job submit --runtime-env-json '{"worker_process_setup_hook": "true_on_policy.fsdp_worker.watch", ...}' ...

Ray calls `watch` in each worker process of the job before an actor is made there. `watch` costs nothing where Miles's
FSDP trainer is not imported. Where it is imported, the pin follows Miles's own step, which switches SGLang's mode on,
and comes before a model is built. The pin does what `true_on_policy.hosts.miles_init` does on Megatron.
"""

import sys
from collections.abc import Callable
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from true_on_policy.errors import ContractError

# In Miles v0.1.0 and main (31f1ca96), FSDPTrainRayActor.init calls STEP after it makes its process groups and
# before its model.
MODULE = "miles.backends.fsdp_utils.actor"
ACTOR = "FSDPTrainRayActor"
STEP = "_enable_true_on_policy_optimizations"

Start = Callable[[Any, Any], None]  # (actor, args): pins before the actor builds its model


def watch() -> None:
    """Pin in this process once it imports Miles's FSDP trainer, or now if the trainer is imported."""
    follow_step(_start)


def follow_step(start: Start) -> None:
    """Call `start(actor, args)` after Miles's step, in this process, now or once it imports Miles's FSDP trainer."""
    if MODULE in sys.modules:
        pin_in(sys.modules[MODULE], start)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(start))


def _start(actor: Any, args: Any) -> None:
    from true_on_policy.hosts.start import start

    start(args)


class _AfterImport(MetaPathFinder):
    """An import finder that lets `pin_in` follow each import of MODULE, also after a look or a failed import."""

    def __init__(self, start: Start):
        self._start = start

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            pin_in(module, self._start)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def pin_in(module: ModuleType, start: Start) -> None:
    """Have the pin follow Miles's step, once; raises ContractError where this version of Miles has no such step."""
    actor = getattr(module, ACTOR, None)
    step = getattr(actor, STEP, None)
    if actor is None or step is None:
        raise ContractError(
            f"{MODULE} has no {ACTOR}.{STEP}: nothing would pin in its trainer; seen in Miles v0.1.0 and main "
            "(31f1ca96)"
        )
    if hasattr(step, "pins"):
        return

    @wraps(step)
    def pinning(self: Any, args: Any) -> None:
        import torch

        step(self, args)
        # Miles's FSDP trainer declares --deterministic-mode, and nothing in it reads the flag.
        torch.use_deterministic_algorithms(args.deterministic_mode)
        start(self, args)

    pinning.pins = True  # type: ignore[attr-defined]
    setattr(actor, STEP, pinning)
