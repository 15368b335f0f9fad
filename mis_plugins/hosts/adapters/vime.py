"""vime: slime's trainer under another name, with vLLM as its engine, which hands on no kept sets and no versions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mis_plugins.hosts import megatron
from mis_plugins.hosts.adapters import slime
from mis_plugins.hosts.needs.slime import VIME

HOST = replace(
    slime.HOST,
    name="vime",
    title="vime",
    package="vime",
    runs=slime.tracks(VIME),
    scores=partial(slime.scored, VIME),
    own_loss=VIME.own_loss.get,
    log_probs=None,
    tracking=VIME.tracking.loaded,
    needs=VIME,
    records=("vime", "megatron", "vllm"),
    version_flags="",
    head_flags="",
    kept_set=lambda keys: False,
    rescore=partial(megatron.rescore, VIME),
)
