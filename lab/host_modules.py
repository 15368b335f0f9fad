"""Where each host keeps the functions that the lab drives, and how it builds their arguments."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True)
class Host:
    """A host as the lab drives it: the paths of its modules, and the signatures of its functions.

    formats: the `qkv_format`s that the host knows.
    """

    name: str
    loss_module: str
    cp_module: str
    tis_path: str
    formats: tuple[str, ...]

    @property
    def loss(self) -> ModuleType:
        return import_module(self.loss_module)

    @property
    def tis(self) -> Callable[..., Any]:
        """The TIS hook of the host's own mis.py."""
        return resolve_name(self.tis_path)

    @property
    def cp(self) -> ModuleType:
        return import_module(self.cp_module)

    def reducer(self, args: Namespace, batch: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Build the host's own `sum_of_sample_mean` of a micro-batch, as its trainer builds it."""
        lengths = batch["total_lengths"], batch["response_lengths"], batch["loss_masks"]
        build, sums = self.cp.get_sum_of_sample_mean, batch["rollout_mask_sums"]
        if self.name == "slime":
            return build(*lengths, sums, args.calculate_per_token_loss)
        layout = args.qkv_format, batch["max_seq_lens"]
        return build(*lengths, args.calculate_per_token_loss, *layout, denominators=sums)

    def layout(self, args: Namespace, max_seq_len: int) -> tuple[Any, ...]:
        """Return the trailing arguments of the host's slicing helpers."""
        return () if self.name == "slime" else (args.qkv_format, max_seq_len)


HOSTS = {
    "miles": Host(
        "miles",
        "miles.backends.training_utils.loss_hub.losses",
        "miles.backends.training_utils.cp_utils",
        "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
        ("thd", "bshd"),
    ),
    "slime": Host(
        "slime",
        "slime.backends.megatron_utils.loss",
        "slime.backends.megatron_utils.cp_utils",
        "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
        ("thd",),
    ),
}
