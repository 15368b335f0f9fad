"""The TIS hook at work on a small batch, with the arguments that a host parsed, beside the oracle."""

from __future__ import annotations

import importlib
from argparse import Namespace


def weights(args: Namespace) -> tuple[list[float], list[float]]:
    """The weights of the hook that the arguments name, and the oracle's, one number a token.

    The oracle and the batch are those of `tests/support`, which has to be on the path.
    """
    import oracle
    from batches import ratio_batch
    from drive import one_rank

    from mis_plugins.config.reading import from_args
    from mis_plugins.config.writing import as_mapping

    batch = ratio_batch([[0.6, 1.5], [1.2], [0.9, 3.0]])
    module, _, name = args.custom_tis_function_path.rpartition(".")
    hook = getattr(importlib.import_module(module), name)
    loss, _, _ = hook(args=args, **batch.hook_kwargs(), parallel_state=one_rank())
    config = {name: value for name, value in as_mapping(from_args(args)).items() if value is not None}
    corrected = oracle.correct(batch.samples, config)
    expected = [
        weight if kept else 0.0
        for row, keep in zip(corrected.weights, corrected.keep, strict=True)
        for weight, kept in zip(row, keep, strict=True)
    ]
    return (loss / batch.pg_loss()).tolist(), expected
