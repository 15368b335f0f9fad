"""vime: slime's trainer under another name, with vLLM as its engine, which hands on no kept sets and no versions."""

from dataclasses import fields, replace
from functools import partial

from mis_plugins.hosts import megatron
from mis_plugins.hosts.adapters import slime
from mis_plugins.hosts.needs import Need, Needs


def _of_vime(need: Need, newest: int = 0) -> Need:
    """A need of slime's in vime, which has slime's modules under its own name, but not the newest of the tracking."""
    return replace(need, host="vime", at=tuple(at.replace("slime", "vime", 1) for at in need.at[newest:]))


VIME = Needs(
    **{each.name: _of_vime(getattr(slime.SLIME, each.name), each.name == "tracking") for each in fields(Needs)}
)
HOST = replace(
    slime.HOST,
    name="vime",
    title="vime",
    package="vime",
    runs=slime.tracks(VIME),
    scores=partial(slime.scored, VIME),
    own_loss=VIME.own_loss.get,
    tracking=VIME.tracking.loaded,
    needs=VIME,
    records=("vime", "megatron", "vllm"),
    version_flags="",
    head_flags="",
    kept_set=lambda keys: False,
    rescore=partial(megatron.rescore, VIME),
)
