"""One record for each rollout engine and each trainer of a proof, which is read without torch.

A new engine is a folder in engines/ whose `__init__.py` makes its record as ENGINE, and imports `specs.py` alone; a new
trainer is a file in trainers/ and its record in TRAINERS. The choices of the command line, the orders of
rounding, certificates and checks follow from the records.
"""

from importlib import import_module
from pkgutil import iter_modules

from true_on_policy.contract.specs import HUGGING_FACE, EngineSpec, NormOrder, SideSpec, at

ROOM = "true_on_policy.engines"


def engines() -> dict[str, EngineSpec]:
    """Return the record of each engine that has a folder in engines/."""
    folders = [module.name for module in iter_modules(import_module(ROOM).__path__) if module.ispkg]
    return {name: import_module(f"{ROOM}.{name}").ENGINE for name in folders}


ENGINES = engines()

TRAINERS = {
    "megatron": SideSpec(
        start=at("true_on_policy.trainers.ranks:start"),
        order=NormOrder(rounds_sum=True, rounds_normalized=False),
        packages=("megatron-core", "torch"),
        splits=True,
    ),
    "hf": SideSpec(
        start=at("true_on_policy.trainers.hf:start"), order=HUGGING_FACE, packages=("torch", "transformers")
    ),
}


def packages() -> tuple[str, ...]:
    """List the distributions whose versions a record of log-probs names, each once."""
    sides = (*ENGINES.values(), *TRAINERS.values())
    return ("mis-plugins", *dict.fromkeys(name for side in sides for name in side.packages), "safetensors")
