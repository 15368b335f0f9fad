"""Compare the engine's and the trainer's log-probs of one micro-batch on the device, by bits.

The comparison does not wait for the device, and its number of kernels does not depend on the number of sequences.
Tokens outside the loss mask are not compared: no engine sampled them (hosts give a tool's tokens the log-prob 0.0).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mis_plugins.hosts.batch import layout_of
from mis_plugins.packing.collectives import Arrival, to_host
from mis_plugins.packing.layout import Layout
from mis_plugins.packing.ragged import Ranks
from mis_plugins.shared.arrays import save_safetensors
from true_on_policy.bitwise import INTEGERS
from true_on_policy.diff.log_prob_record import LogProbRecord, absent, provenance
from true_on_policy.errors import ContractError

LENGTHS = ("total_lengths", "response_lengths", "max_seq_lens")


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The sequences of a micro-batch that have the log-probs of both sides: T tokens on this rank.

    engine, trainer: the log-probs of each side.
    valid: whether a token is in the loss mask.
    numbers: the numbers of the sequences in the host's micro-batch.
    tokens: the tokens of each sequence, prompt and response; every rank holds all of them.
    loss_masks: the loss mask of each response; every rank holds all of it.
    layout: where the responses lie on this rank.
    flags: the numbers of compared and of different tokens, on the device.
    copied: the flags in pinned memory, to be read after `arrival`.
    """

    engine: Float[Tensor, "T"]
    trainer: Float[Tensor, "T"]
    valid: Bool[Tensor, "T"]
    numbers: Sequence[int]
    tokens: Sequence[Tensor]
    loss_masks: Sequence[Tensor]
    layout: Layout
    flags: Int64[Tensor, "2"]
    copied: Int64[Tensor, "2"]
    arrival: Arrival

    @classmethod
    def compare(cls, args: Any, batch: Mapping[str, Any], cp: tuple[int, int]) -> "MicroBatch | None":
        """Compare a micro-batch, and begin to copy its flags; None where no sequence has the log-probs of both sides.

        Args:
            args, batch: a host's arguments and micro-batch.
            cp: (size, rank) of context parallelism.

        Raises:
            ContractError: the two sides differ in dtype, or a side's number of log-probs is not that of the
                tokens.
        """
        count = len(batch["loss_masks"])
        sides = [batch.get(name) or [None] * count for name in ("rollout_log_probs", "log_probs")]
        present = [i for i in range(count) if all(side[i] is not None for side in sides)]
        if not present:
            return None
        lengths = {name: [batch[name][i] for i in present] for name in LENGTHS if batch.get(name)}
        layout = layout_of(args, lengths, cp)
        masks = [batch["loss_masks"][i] for i in present]
        valid = layout.place(torch.cat(masks), Ranks()).loss_mask
        named = zip(("rollout_log_probs", "log_probs"), sides, strict=True)
        engine, trainer = (_packed(name, [side[i] for i in present], layout, valid.device) for name, side in named)
        if engine.dtype != trainer.dtype:
            raise ContractError(
                f"rollout_log_probs are {engine.dtype} and log_probs {trainer.dtype}: two dtypes have no bits in "
                "common. Miles casts both to one dtype with --true-on-policy-mode and --bf16 or --fp16"
            )
        integers = INTEGERS[engine.element_size()]
        # By bits, -0.0 differs from 0.0; what stands in for a log-prob differs from itself.
        differs = ((engine.view(integers) != trainer.view(integers)) | absent(engine)) & valid
        flags = torch.stack([valid.sum(), differs.sum()])
        copied = to_host(flags)
        tokens = [batch["unconcat_tokens"][i] for i in present]
        arrival = Arrival.of_copies_from(flags)
        return cls(engine, trainer, valid, present, tokens, masks, layout, flags, copied, arrival)

    def read(self) -> tuple[int, int]:
        """Read the numbers of compared and of different tokens, and wait where their copy has not arrived yet."""
        self.arrival.wait()
        compared, different = self.copied.tolist()
        return compared, different

    def on_host(self) -> tuple[Tensor, Tensor, Tensor]:
        """Copy engine, trainer and valid to the host; the three copies begin together and are awaited once."""
        copies = to_host(self.engine), to_host(self.trainer), to_host(self.valid)
        Arrival.of_copies_from(self.engine).wait()
        return copies

    def ends(self) -> list[int]:
        """Return where each sequence begins among this rank's T tokens, and T as the last end."""
        return [0, *accumulate(self.layout.local_lengths)]

    def positions(self, sequence: int) -> list[int]:
        """Return the position in its response of each token of a sequence that lies on this rank."""
        return [position for start, stop in self.layout.pieces(sequence) for position in range(start, stop)]

    def locate(self, index: int) -> tuple[int, int]:
        """Return (sequence, position in its response) of the token at `index` among this rank's tokens."""
        ends = self.ends()
        sequence = bisect_right(ends, index) - 1
        return sequence, self.positions(sequence)[index - ends[sequence]]


def _packed(name: str, log_probs: Sequence[Any], layout: Layout, device: torch.device) -> Float[Tensor, "T"]:
    """Concatenate this rank's log-probs; empty tensors are left out, because their dtype could promote the others."""
    counts = [x.numel() for x in log_probs]
    if counts != layout.local_lengths:
        raise ContractError(
            f"{name}: {counts} tokens a sequence, but {layout.local_lengths} of their responses lie on this rank"
        )
    filled = [x for x in log_probs if x.numel()]
    return torch.cat(filled).detach() if filled else torch.empty(0, device=device)


NO_VERSION = -1


def write_sample(batch: MicroBatch, sequence: int, folder: Path, metadata: Mapping[str, str]) -> tuple[Path, Path]:
    """Write one sequence as two files to compare, and return them; raises RecordError or OSError on a full disk."""
    ends = batch.ends()
    mine = slice(ends[sequence], ends[sequence + 1])
    engine, trainer, valid = (x[mine] for x in batch.on_host())
    tokens, loss_mask = (to_host(x[sequence]) for x in (batch.tokens, batch.loss_masks))
    Arrival.of_copies_from(batch.loss_masks[sequence]).wait()
    positions = torch.tensor(batch.positions(sequence), dtype=torch.int64)[valid]
    response = tokens[len(tokens) - len(loss_mask) :].to(torch.int64)
    whole = {"tokens": tokens.to(torch.int64), "loss_mask": loss_mask, "positions": positions}
    save_safetensors(folder / "sample.safetensors", whole)
    header = {**metadata, **provenance()}
    for name, log_probs in (("engine", engine), ("trainer", trainer)):
        LogProbRecord(
            tokens=response[positions],
            log_probs=log_probs[valid],
            versions=torch.full((len(positions),), NO_VERSION),
            cu_seqlens=torch.tensor([0, len(positions)]),
            metadata={**header, "side": name},
        ).save(folder / f"{name}.safetensors")
    return folder / "engine.safetensors", folder / "trainer.safetensors"
