"""`python -m true_on_policy verify`: is every log-prob that the engine sampled with, bit for bit, the trainer's?

The engine samples, scores what it sampled, and takes new weights in between; the trainer computes the same tokens; the
links of the chain are compared by bytes. Then the control: with stock kernels on both sides the chain must break.

Exit codes: 0 equal, in every situation that the engine and its requests could meet; 1 different; 2 could not compare,
which is an error, a control that holds too, or a situation that was not met.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

from mis_plugins.shared.commit import commit
from mis_plugins.shared.storage import RecordError, check_writable, optional
from true_on_policy.contract.choices import BackendName, DtypeName, EngineName, Side, TrainerName
from true_on_policy.contract.cpu import DTYPES, Contract, Shapes
from true_on_policy.contract.norm_order import ORDERS, NormOrder, agreed_order
from true_on_policy.engines.protocol import Engine, Sample
from true_on_policy.errors import ContractError
from true_on_policy.kernels.row_parallel import Tree, agreed_tree
from true_on_policy.trainers.protocol import Trainer
from true_on_policy.verify.certificate import Certificate, Verdict, hashes
from true_on_policy.verify.links import Evidence, LogProbs, conclusion, links
from true_on_policy.verify.situations import Ability, counted, met, not_met, not_of_engine
from true_on_policy.verify.workload import Workload, arrangements

EXIT: dict[Verdict, int] = {"equal": 0, "different": 1, "vacuous": 2, "incomplete": 2}
PICTURES = (".png", ".pdf", ".svg")
UPDATES = 3
SCORED_AT_ONCE = 8
CONTROL_TOKENS = 500
PREFILL_CHUNK = 128
RETRACT_EVERY = 40  # decode steps of SGLang between two preemptions by force


def _sglang(checkpoint: Path, contract: Contract, order: NormOrder | None) -> Engine:
    from true_on_policy.engines.sglang import Pool, SGLang

    return SGLang(
        checkpoint,
        contract.dtype,
        contract if order is not None else None,
        order if order != ORDERS["sglang"] else None,
        Pool(prefill_chunk=PREFILL_CHUNK, retract_every=RETRACT_EVERY),
        contract.engine_tensor_parallel,
    )


def _vllm(checkpoint: Path, contract: Contract, order: NormOrder | None) -> Engine:
    from true_on_policy.engines.vllm import VLLM, Pool

    pinned_to = contract if order is not None else None
    return VLLM(checkpoint, contract.dtype, pinned_to, order, Pool(prefill_chunk=PREFILL_CHUNK))


def _hf_engine(checkpoint: Path, contract: Contract, order: NormOrder | None) -> Engine:
    from true_on_policy.engines.hf import HuggingFace

    return HuggingFace(checkpoint, contract.dtype, order, _tree(contract, order))


def _megatron(checkpoint: Path, contract: Contract, order: NormOrder | None) -> Trainer:
    if contract.trainer_tensor_parallel > 1:
        from true_on_policy.trainers.ranks import MegatronRanks

        return MegatronRanks(checkpoint, contract, order)
    from true_on_policy.trainers.megatron import Megatron

    return Megatron(checkpoint, contract.dtype, order, _tree(contract, order))


def _hf_trainer(checkpoint: Path, contract: Contract, order: NormOrder | None) -> Trainer:
    from true_on_policy.trainers.hf import HuggingFace

    return HuggingFace(checkpoint, contract.dtype, order, _tree(contract, order))


def _tree(contract: Contract, order: NormOrder | None) -> Tree | None:
    return None if order is None else agreed_tree(contract)


# Without an order a side is stock: its own kernels, its own order of rounding and adding.
ENGINES: dict[EngineName, Callable[[Path, Contract, NormOrder | None], Engine]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "hf": _hf_engine,
}
TRAINERS: dict[TrainerName, Callable[[Path, Contract, NormOrder | None], Trainer]] = {
    "megatron": _megatron,
    "hf": _hf_trainer,
}
# Situations that each engine meets of itself and tells of; vLLM's server tells of no preemption.
ABILITIES: dict[str, tuple[Ability, ...]] = {
    "sglang": ("prefix cache", "preemption"),
    "vllm": ("prefix cache",),
    "hf": (),
}
# What can be split over tensor-parallel ranks.
SPLIT = {"engine": "sglang", "trainer": "megatron"}


def run(arguments: argparse.Namespace) -> int:
    _quiet()
    plan = Plan.of(arguments)
    for flag, path in (("--json", arguments.json), ("--picture", arguments.picture)):
        if path:
            check_writable(path, flag)
    if arguments.picture:
        _check_picture(arguments.picture)
    with TemporaryDirectory(prefix="true-on-policy-") as scratch:
        certificate, off, on = verify(plan, Path(scratch))
    print(certificate)
    if arguments.json:
        certificate.write(arguments.json)
    if arguments.picture:
        from true_on_policy.verify.picture import draw

        draw(off, on, plan.title, arguments.picture)
    return EXIT[certificate.verdict]


def _check_picture(path: Path) -> None:
    """Called before the work, which takes minutes.

    Raises:
        RecordError: no picture can be drawn there.
    """
    if path.suffix not in PICTURES:
        raise RecordError(f"--picture {path}: end its name in {' or '.join(PICTURES)}")
    optional("matplotlib.figure")


def _quiet() -> None:
    """Keep other packages' progress bars and advice for GPUs off the terminal."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"megatron\.")


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Plan:
    """The choices of the command line."""

    engine: EngineName
    trainer: TrainerName
    model: str
    dtype: DtypeName
    tokens: int
    backend: BackendName
    norm_order: Side
    trainer_tensor_parallel: int
    engine_tensor_parallel: int
    leaves: int
    seed: int

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Plan:
        if arguments.tokens < 1:
            raise ContractError(f"--tokens: got {arguments.tokens}; compare one at least")
        for side, able in SPLIT.items():
            if getattr(arguments, f"{side}_tensor_parallel") > 1 and getattr(arguments, side) != able:
                raise ContractError(
                    f"--{side}-tensor-parallel: {getattr(arguments, side)} runs on one rank; choose --{side} {able}"
                )
        return cls(**{name: getattr(arguments, name) for name in cls.__dataclass_fields__})

    @property
    def title(self) -> str:
        engine, trainer = (
            f"{name} on {ranks} ranks" if ranks > 1 else name
            for name, ranks in (
                (self.engine, self.engine_tensor_parallel),
                (self.trainer, self.trainer_tensor_parallel),
            )
        )
        return f"{engine} against {trainer}, {self.model}, {self.dtype}"

    def contract(self, shapes: Shapes) -> Contract:
        return Contract(
            self.backend,
            self.dtype,
            self.norm_order,
            trainer_tensor_parallel=self.trainer_tensor_parallel,
            engine_tensor_parallel=self.engine_tensor_parallel,
            leaves=self.leaves,
            shapes=shapes,
        )


def verify(plan: Plan, scratch: Path) -> tuple[Certificate, Evidence, Evidence]:
    """The certificate, and the evidence of the control and of the chain."""
    from true_on_policy.kernels.pin import pinned
    from true_on_policy.models.tiny import check_shares, checkpoint, read_config

    started, ran = time.monotonic(), commit()
    source = checkpoint(plan.model, scratch / "0", DTYPES[plan.dtype], plan.seed)
    config = read_config(source)
    contract = plan.contract(Shapes.of(config))
    check_shares(config, contract)
    order = agreed_order(contract, plan.engine, plan.trainer)
    workload = Workload(config.vocab_size, plan.seed)
    _tell(f"{plan.title}: starting the engine")
    with (
        pinned(contract),
        closing(ENGINES[plan.engine](source, contract, order)) as engine,
        closing(TRAINERS[plan.trainer](source, contract, order)) as trainer,
    ):
        versions = engine.versions()
        on = _chain(plan, engine, trainer, workload, source, scratch)
    _tell("control: starting the engine with stock kernels")
    off = _control(plan, contract, workload, source)
    counts, abilities = counted(on), ABILITIES[plan.engine]
    certificate = Certificate(
        engine={"name": plan.engine, **versions},
        trainer=plan.trainer,
        model=plan.model,
        contract=contract,
        order=order,
        links=links(on),
        control=conclusion(off, "control: stock engine decode == stock trainer"),
        situations=counts,
        met=met(counts, abilities),
        not_met=not_met(counts, abilities),
        not_of_engine=not_of_engine(abilities),
        hashes=hashes(on),
        commit=ran,
        seconds=round(time.monotonic() - started, 1),
    )
    return certificate, off, on


def _chain(
    plan: Plan, engine: Engine, trainer: Trainer, workload: Workload, source: Path, scratch: Path
) -> Evidence:
    """The evidence of all versions of the weights; both sides read each from the same file."""
    from true_on_policy.models.tiny import updated

    evidence = Evidence()
    for version in range(UPDATES + 1):
        if version:
            update = updated(source, scratch / str(version), plan.seed + version)
            engine.update_weights(update, version)
            trainer.load(update)
        share = ceil(plan.tokens / (UPDATES + 1))
        batches = workload.sample(engine.generate, share, full_set=version == UPDATES)
        samples = [*chain.from_iterable(batches)]
        _tell(f"weights {version}: sampled {sum(len(sample.tokens) for sample in samples)} tokens")
        evidence += Evidence(
            samples=samples,
            batches=[*map(len, batches)],
            prefill=_scores(engine, samples),
            trainer=[trainer.log_probs([sample], [1.0])[0] for sample in samples],
            trainer_tempered=_tempered(trainer, samples),
            packed={
                name: _packed(trainer, samples, batches) for name, batches in arrangements(samples, plan.seed)
            },
        )
    return evidence


def _control(plan: Plan, contract: Contract, workload: Workload, source: Path) -> Evidence:
    """Decoded and recomputed with stock kernels, each side in its own order."""
    with closing(ENGINES[plan.engine](source, contract, None)) as engine:
        batches = workload.sample(engine.generate, min(plan.tokens, CONTROL_TOKENS))
    samples = [*chain.from_iterable(batches)]
    with closing(TRAINERS[plan.trainer](source, contract, None)) as trainer:
        return Evidence(samples=samples, trainer_tempered=_tempered(trainer, samples))


def _scores(engine: Engine, samples: Sequence[Sample]) -> LogProbs:
    starts = range(0, len(samples), SCORED_AT_ONCE)
    return [score for start in starts for score in engine.score(samples[start : start + SCORED_AT_ONCE])]


def _tempered(trainer: Trainer, samples: Sequence[Sample]) -> LogProbs:
    return [trainer.log_probs([sample], [sample.request.temperature])[0] for sample in samples]


def _packed(trainer: Trainer, samples: Sequence[Sample], batches: Sequence[Sequence[int]]) -> LogProbs:
    computed = {}
    for batch in batches:
        log_probs = trainer.log_probs([samples[index] for index in batch], [1.0] * len(batch))
        computed |= dict(zip(batch, log_probs, strict=True))
    return [computed[index] for index in range(len(samples))]
