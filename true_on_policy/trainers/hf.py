"""Hugging Face transformers as the trainer of a proof, with the sequences of a batch padded on the right."""

from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.specs import NormOrder
from true_on_policy.kernels.row_parallel import Tree, agreed_tree
from true_on_policy.models import hf_decoder
from true_on_policy.models.hf_decoder import padded, take
from true_on_policy.trainers.protocol import InProcess


def start(checkpoint: Path, contract: Contract, order: NormOrder | None) -> "HuggingFace":
    """Start the trainer of a proof; without an `order` the trainer is stock."""
    return HuggingFace(checkpoint, contract.dtype, order, order and agreed_tree(contract))


class HuggingFace(InProcess):
    """A decoder of transformers in evaluation mode; without an `order` and a `tree` the model is Hugging Face's own."""

    name = "hf"

    def __init__(self, checkpoint: Path, dtype: str, order: NormOrder | None = None, tree: Tree | None = None):
        self.model = hf_decoder.load(checkpoint, dtype, order, tree)

    def load(self, checkpoint: Path) -> None:
        take(self.model, checkpoint)

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ V"]]:
        """Compute the logits of each sequence, in one pass over all sequences."""
        tokens, present = padded(sequences, "right")
        logits = self.model(input_ids=tokens, attention_mask=present).logits
        return [rows[: len(sequence)] for rows, sequence in zip(logits, sequences, strict=True)]
