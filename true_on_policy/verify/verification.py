"""The verification behind `python -m true_on_policy verify`, which `__main__.py` describes: chain and control."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, islice
from logging import ERROR, getLogger
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mis_plugins.shared.files import check_writable
from mis_plugins.shared.provenance import commit
from mis_plugins.shared.terminal import progress, tell
from true_on_policy.contract.cpu import DTYPES, Contract, Shapes
from true_on_policy.contract.rounding import NormOrder, agreed_order
from true_on_policy.contract.sides import ENGINES, TRAINERS
from true_on_policy.engines.protocol import Engine, Sample
from true_on_policy.errors import ContractError, EngineError
from true_on_policy.trainers.protocol import Trainer
from true_on_policy.verify.certificate import Certificate, Evidence, LogProbs, Verdict, conclusion, hashes, links
from true_on_policy.verify.prompts import Prompts, read_prompts
from true_on_policy.verify.workload import Workload, arrangements, counted, situations

EXIT: dict[Verdict, int] = {"equal": 0, "different": 1, "vacuous": 2, "incomplete": 2}
UPDATES = 3
SCORED_AT_ONCE = 8
Jobs = list[Callable[[], LogProbs]]
CONTROL_TOKENS = 500
FLAGS = {f"contract.{field.name}": f"--{field.name.replace('_', '-')}" for field in fields(Contract)}


def run(arguments: argparse.Namespace) -> int:
    return EXIT[certified(arguments)[0].verdict]


def certified(arguments: argparse.Namespace) -> tuple[Certificate, Evidence, Evidence]:
    """Run and print the verification of a command line, write its certificate, and return what `verify` returns."""
    _quiet()
    try:
        check(arguments)
        if arguments.json:
            check_writable(arguments.json, "--json")
        with TemporaryDirectory(prefix="true-on-policy-") as scratch:
            certificate, off, on = verify(arguments, Path(scratch))
    except (ContractError, EngineError) as error:  # quotes the flags that the user typed
        raise error.spelled(FLAGS) from error
    print(certificate)
    if arguments.json:
        certificate.write(arguments.json)
    return certificate, off, on


def _quiet() -> None:
    """Keep other packages' progress bars and reports off the terminal; `trainers/__init__.py` does so with warnings."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Megatron reports the layer of experts that the trainer's spec names.
    getLogger("megatron.core.transformer.transformer_layer").setLevel(ERROR)


def check(arguments: argparse.Namespace) -> None:
    """Check the command line before anything starts or is fetched; raises ContractError where a flag cannot work."""
    if arguments.tokens < 1:
        raise ContractError(f"--tokens: got {arguments.tokens}; compare one at least")
    for side, specs in (("engine", ENGINES), ("trainer", TRAINERS)):
        name, able = getattr(arguments, side), [name for name, spec in specs.items() if spec.splits]
        if getattr(arguments, f"{side}_tensor_parallel") > 1 and name not in able:
            others = " or ".join(able)
            raise ContractError(f"--{side}-tensor-parallel: {name} runs on one rank; choose --{side} {others}")
    agreed(arguments)


def agreed(plan: argparse.Namespace) -> Contract:
    """Return the contract of a command line, at the shapes of no model yet."""
    return Contract(**{field.name: getattr(plan, field.name) for field in fields(Contract) if field.name != "shapes"})


def title(plan: argparse.Namespace) -> str:
    sides = [
        f"{name} on {ranks} ranks" if ranks > 1 else name
        for name, ranks in ((plan.engine, plan.engine_tensor_parallel), (plan.trainer, plan.trainer_tensor_parallel))
    ]
    return f"{' against '.join(sides)}, {plan.model}, {plan.dtype}"


@dataclass(frozen=True)
class Setup:
    """A setup holds what both sides start from, and the work to do.

    plan: the arguments of the command line.
    source: the folder of the checkpoint.
    """

    plan: argparse.Namespace
    source: Path
    contract: Contract
    order: NormOrder
    prompts: Prompts | None
    workload: Workload

    @classmethod
    def of(cls, plan: argparse.Namespace, folder: Path) -> "Setup":
        from true_on_policy.models.hf_decoder import check_weights
        from true_on_policy.models.pretrained import checkpoint_of
        from true_on_policy.models.tiny import check_shares, read_config

        source = checkpoint_of(plan.model, folder, DTYPES[plan.dtype], plan.seed, tell)
        config = read_config(source)
        check_weights(source)
        prompts = read_prompts(plan.prompts, source) if plan.prompts else None
        contract = replace(agreed(plan), shapes=Shapes.of(config))
        check_shares(config, contract)
        order = agreed_order(contract, plan.engine, plan.trainer)
        workload = Workload(config.vocab_size, plan.seed, prompts.tokens if prompts else ())
        return cls(plan, source, contract, order, prompts, workload)

    def started(self, sides: Mapping[str, Any], name: str, stock: bool = False) -> Any:
        """Start an engine or a trainer, to be closed at the end of a `with` block."""
        return closing(sides[name].start(self.source, self.contract, None if stock else self.order))


def verify(plan: argparse.Namespace, scratch: Path) -> tuple[Certificate, Evidence, Evidence]:
    """Run the chain and the control; return the certificate, the control's evidence and the chain's evidence."""
    from true_on_policy.models.tiny import weights_hash

    started, ran = time.monotonic(), commit()
    setup = Setup.of(plan, scratch / "0")
    tell(f"{title(plan)}: starting the engine")
    versions, on = _chain(setup, scratch)
    tell("control: starting the engine with stock kernels")
    off = _control(setup)
    counts = counted(on)
    certificate = Certificate(
        engine={"name": plan.engine, **versions},
        trainer=plan.trainer,
        model=plan.model,
        weights=weights_hash(setup.source),
        prompts=setup.prompts and setup.prompts.as_dict(),
        contract=setup.contract,
        order=setup.order,
        links=links(on),
        control=conclusion(off, "control: stock engine decode == stock trainer"),
        situations=counts,
        **situations(counts, ENGINES[plan.engine].abilities)._asdict(),
        hashes=hashes(on),
        commit=ran,
        seconds=round(time.monotonic() - started, 1),
    )
    return certificate, off, on


def _chain(setup: Setup, scratch: Path) -> tuple[Mapping[str, str], Evidence]:
    """Start both sides with pinned kernels; return the versions of the engine's packages and the chain's evidence."""
    from true_on_policy.kernels.pin import pinned

    with (
        pinned(setup.contract),
        setup.started(ENGINES, setup.plan.engine) as engine,
        setup.started(TRAINERS, setup.plan.trainer) as trainer,
    ):
        return engine.versions(), _evidence(setup, engine, trainer, scratch)


def _evidence(setup: Setup, engine: Engine, trainer: Trainer, scratch: Path) -> Evidence:
    """Collect the evidence of all versions of the weights; both sides read each version from one file."""
    from true_on_policy.models.tiny import updated

    evidence, seed = Evidence(), setup.plan.seed
    for version in range(UPDATES + 1):
        if version:
            update = updated(setup.source, scratch / str(version), seed + version)
            engine.update_weights(update, version)
            trainer.load(update)
        share = ceil(setup.plan.tokens / (UPDATES + 1))
        batches = setup.workload.sample(engine.generate, share, full_set=version == UPDATES)
        samples = [*chain.from_iterable(batches)]
        tell(f"weights {version}: sampled {sum(len(sample.tokens) for sample in samples)} tokens")
        orders = dict(arrangements(samples, seed))
        starts = range(0, len(samples), SCORED_AT_ONCE)
        done = _computed({  # in the order of the fields of Evidence
            "prefill": [partial(engine.score, samples[start : start + SCORED_AT_ONCE]) for start in starts],
            "trainer": [partial(trainer.log_probs, [sample], [1.0]) for sample in samples],
            "trainer_tempered": _tempered(trainer, samples),
            **{name: _packed(trainer, samples, order) for name, order in orders.items()},
        })  # fmt: skip
        packed = {name: _in_order(order, done.pop(name)) for name, order in orders.items()}
        evidence += Evidence(samples, [*map(len, batches)], *done.values(), packed=packed)
    return evidence


def _control(setup: Setup) -> Evidence:
    """Collect the evidence of the control: decoded and recomputed with stock kernels, each side in its own order."""
    with setup.started(ENGINES, setup.plan.engine, stock=True) as engine:
        batches = setup.workload.sample(engine.generate, min(setup.plan.tokens, CONTROL_TOKENS))
    samples = [*chain.from_iterable(batches)]
    with setup.started(TRAINERS, setup.plan.trainer, stock=True) as trainer:
        return Evidence(samples=samples, trainer_tempered=_computed({"": _tempered(trainer, samples)})[""])


def _computed(jobs: Mapping[str, Jobs]) -> dict[str, LogProbs]:
    """Run all jobs, saying every two seconds how many are done, and join the log-probs of each name."""
    done = iter([job() for job in progress([*chain.from_iterable(jobs.values())], "computations done")])
    return {name: [*chain.from_iterable(islice(done, len(part)))] for name, part in jobs.items()}


def _tempered(trainer: Trainer, samples: Sequence[Sample]) -> Jobs:
    return [partial(trainer.log_probs, [sample], [sample.request.temperature]) for sample in samples]


def _packed(trainer: Trainer, samples: Sequence[Sample], order: Sequence[Sequence[int]]) -> Jobs:
    return [partial(trainer.log_probs, [samples[index] for index in batch], [1.0] * len(batch)) for batch in order]


def _in_order(order: Sequence[Sequence[int]], log_probs: LogProbs) -> LogProbs:
    """Return the log-probs of batches in the order of their samples."""
    by_index = dict(zip(chain.from_iterable(order), log_probs, strict=True))
    return [by_index[index] for index in range(len(by_index))]
