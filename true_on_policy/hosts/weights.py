"""Prove in a host's loop that its engines hold the trainer's weights: before the first rollout, or after each update.

A host hands its weight update to no hook, and Ray keeps the methods that it calls of a class. So the init hook waits
for the trainer's `weight_updater`, which both hosts make after the hook, and proves what its `update_weights` has sent:
there process groups are up and engines resident. The trainer's weights are those that the host keeps under the tag
`actor`, in Hugging Face's names by the host's own conversion; an engine tells its digests to the host's own
`check_weights`. Rank 0 compares, and holds one copy of the model in its CPU memory while it does.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from mis_plugins.config.view import view
from mis_plugins.errors import warn_once
from mis_plugins.hosts.needs import Need, VersionNeeds
from mis_plugins.hosts.registry import current
from mis_plugins.packing.roll_call import together
from true_on_policy.engines.handover import DIGESTS
from true_on_policy.errors import DifferenceError, HostConfigError, NotSeenError
from true_on_policy.hosts.config import BitwiseConfig
from true_on_policy.hosts.watch import own_rank
from true_on_policy.weights.comparison import Comparison, Part, against, digests_of, untold

logger = logging.getLogger("true_on_policy")
R = TypeVar("R")

HOOK = "true_on_policy.hosts.prove_weights"
ACTOR, REFERENCE = "actor", "ref"  # tags under which both hosts keep weights
UPDATER = "weight_updater"
BASE = "backends.megatron_utils.update_weight.hf_weight_iterator_base:HfWeightIteratorBase.create"


def install(args: Any) -> None:
    """Have the weight updates of the calling trainer be followed by the proof that `bitwise.weights` asks for.

    Raises:
        HostConfigError: the caller is not the trainer of Miles or slime on Megatron, or an argument takes from the
            trainer the place where it could compare.
    """
    host = current(args)
    frame = host.needs.init.frame() if isinstance(host.needs, VersionNeeds) else {}
    actor = frame.get("self")
    if actor is None:
        raise HostConfigError(
            f"--custom-megatron-init-path {HOOK}: not called by the init of Miles's or slime's trainer on Megatron, "
            "whose weight updates it follows; give it there, or leave out bitwise.weights"
        )
    if actor.role == "critic" or isinstance(vars(type(actor)).get(UPDATER), Updater):  # a second call changes nothing
        return
    if any(map(view(args).get, ("lora_rank", "lora_adapter_path", "multi_lora"))):
        raise HostConfigError(
            "LoRA (--lora-rank): engines hold adapters apart, which are not compared; leave out bitwise.weights"
        )
    deferred = _reloads_later(view(args))
    proof, own = Proof(BitwiseConfig.from_args(args), host.package), type(actor)
    setattr(own, UPDATER, Updater(proof, deferred))
    name = host.needs.train_actor.name_on(own)
    setattr(own, name, _preceding(getattr(own, name), proof))


def _reloads_later(args: Mapping[str, Any]) -> bool:
    """Whether engines read the published weights from a disk after the trainer's part of an update is over."""
    if args.get("update_weight_transport") != "disk" or args.get("update_weight_mode") != "full":
        return False
    for name in ("release_train", "offload_rollout"):
        if args.get(name):
            raise HostConfigError(
                f"--{name.replace('_', '-')} beside --update-weight-transport disk: no trainer and engine hold weights "
                "at one time after the engine has read them; use another transport, or leave out bitwise.weights"
            )
    return True


@dataclass
class Proof:
    """The proof of one trainer process, which is collective over the trainer's ranks.

    package: the host's, in which its conversion to Hugging Face's names is found.
    before: what each engine held before the latest update; on rank 0 alone.
    due: whether an update is to be proven and is not yet.
    proven: whether an update was compared.
    sent: how many updates have reached the engines.
    """

    config: BitwiseConfig
    package: str
    before: list[list[Part]] = field(default_factory=list)
    due: bool = False
    proven: bool = False
    sent: int = 0

    def begin(self, actor: Any) -> None:
        """Note what the engines hold, so that an update that does not arrive is told from a wrong one."""
        self.due, self.sent = not self.proven or self.config.weights == "every", self.sent + 1
        if self.due:
            self.before = _on_rank_0(lambda: self.before or _of_engines(actor), [])

    def end(self, actor: Any) -> None:
        """Compare every tensor of each engine with the trainer's.

        Raises:
            DifferenceError: an engine holds other weights, with `bitwise.on_difference: raise`; every rank raises.
            NotSeenError: an engine does not tell its weights; the other ranks raise a MisError that quotes it.
        """
        if not self.due:
            return
        self.due, self.proven = False, True
        weights, before = _named(actor, ACTOR, self.package), self.before
        self.before = now = _on_rank_0(lambda: _of_engines(actor), [])
        comparisons = _on_rank_0(lambda: [against(parts, weights) for parts in now], [])
        first = next((number for number, comparison in enumerate(comparisons) if not comparison.equal), None)
        update = f"weights of version {actor.weight_updater.weight_version}"
        if _shared(first) is None:
            if own_rank() == 0:
                logger.info("%s, %d engines: %s", update, len(comparisons), comparisons[0])
            return
        reference = self._reference(actor)
        message = ""
        if first is not None:
            equals = _equals(comparisons[first], before[first] if first < len(before) else (), now[first], reference)
            message = f"{update}, engine {first}: {comparisons[first].summary}{equals}"
            logger.warning("%s", message)
        if self.config.on_difference == "raise":
            raise DifferenceError(f"{_shared(message)} (bitwise.weights, with bitwise.on_difference: raise)")

    def _reference(self, actor: Any) -> dict[str, Tensor] | None:
        """Gather the reference's weights, where the host keeps them. Collective."""
        kept = REFERENCE in actor.weights_backuper.backup_tags
        return _named(actor, REFERENCE, self.package) if kept else None


def _equals(
    comparison: Comparison, before: Sequence[Part], now: Sequence[Part], reference: Mapping[str, Tensor] | None
) -> str:
    """Tell whose weights an engine holds wherever it does not hold the trainer's; empty where that is not known."""
    held = {(name, part.place): digest for part in now for name, digest in part.digests.items()}
    earlier = {(name, part.place): digest for part in before for name, digest in part.digests.items()}
    holders = []
    if all(earlier.get(place) == held.get(place, "") for place in comparison.places):
        holders.append("what it held before this update")
    if reference is not None and comparison.places <= held.keys() - against(now, reference).places:
        holders.append("the reference's weights (--ref-load)")
    return f"; where they differ, the engine holds {' and '.join(holders)}" if holders else ""


@dataclass(frozen=True)
class Updater:
    """The trainer's attribute `weight_updater`: once it is set, each of its updates is proven.

    deferred: whether engines read the weights only after the update.
    """

    proof: Proof
    deferred: bool

    def __set__(self, actor: Any, updater: Any) -> None:
        vars(actor)[UPDATER], publish = updater, updater.update_weights

        @wraps(publish)
        def published(*given: Any, **named: Any) -> None:
            self.proof.begin(actor)
            publish(*given, **named)
            if not self.deferred:
                self.proof.end(actor)

        updater.update_weights = published


def _preceding(train: Callable[..., R], proof: Proof) -> Callable[..., R]:
    """Prove before the training what the latest update left to be proven."""

    @wraps(train)
    def preceded(actor: Any, *given: Any, **named: Any) -> R:
        if not proof.sent:
            warn_once("bitwise.weights: the host has sent no weights to an engine, so that nothing is proven")
        proof.end(actor)
        return train(actor, *given, **named)

    return preceded


def _named(actor: Any, tag: str, package: str) -> dict[str, Tensor]:
    """Gather the weights of a tag under Hugging Face's names; on rank 0, and empty on others. Collective."""
    create = Need(package, "its weights in Hugging Face's names", (HOOK,), (f"{package}.{BASE}",)).get()
    kept, updater = actor.weights_backuper, actor.weight_updater
    # Miles keeps no copy where nothing else is ever loaded into the model.
    local = kept.get(tag) if tag in kept.backup_tags else dict(kept._source_getter())
    settings = {"model_name": updater.model_name, "quantization_config": updater.quantization_config}
    named: dict[str, Tensor] = {}
    # On every rank: each chunk is gathered over the ranks.
    for chunk in create(actor.args, actor.model, **settings).get_hf_weight_chunks(local):
        if own_rank() == 0:
            named |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in chunk}
    return named


def _of_engines(actor: Any) -> list[list[Part]]:
    """Ask each engine that the host updates for the digests of its tensors."""
    import ray  # pyright: ignore[reportMissingImports]

    updater = actor.weight_updater
    engines = [*updater.rollout_engines, *getattr(updater, "distributed_rollout_engines", ())]
    asked = [engine.check_weights.remote(action=DIGESTS) for engine in engines]
    try:
        # A further node of an engine answers None.
        answers = [answer for answer in map(ray.get, asked) if answer is not None]
    except Exception as error:
        raise NotSeenError(untold(str(error).rstrip().rpartition("\n")[2])) from error
    if not answers:
        raise NotSeenError("bitwise.weights: the host updates no engine, so that nothing can be compared")
    return [digests_of(lambda body, answer=answer: answer) for answer in answers]


def _on_rank_0(work: Callable[[], R], elsewhere: R) -> R:
    """Do on rank 0 what only one rank needs; where rank 0 cannot, every rank raises. Collective."""
    return together("bitwise.weights", work if own_rank() == 0 else lambda: elsewhere)


def _shared(value: R) -> R:
    """Return what rank 0 says. Collective."""
    if not dist.is_initialized():
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]
