"""The record of a need: something of a host that a hook of ours calls, replaces, or reads in a frame."""

import importlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from mis_plugins.errors import MisError

TIS_HOOK, LOSS = ("compute_mis_weights_with_cp",), ("policy_loss",)
ROLLOUT, STEP, ROUTES = ("normalize_rollout", "count_samples"), ("report_step",), ("watch_routes",)
GENERATE, CONVERT, CARRY = ("generate_with_versions",), ("convert_with_versions",), ("carry_versions",)
BITWISE_LOSS, BITWISE_INIT = ("true_on_policy.hosts.policy_loss",), ("true_on_policy.hosts.miles_init",)
HOOKS = (
    *(*TIS_HOOK, *LOSS, *ROLLOUT, *STEP, "drop_broken_samples", "kept_token_mean", *ROUTES),
    *(*GENERATE, *CONVERT, *CARRY, *BITWISE_LOSS, *BITWISE_INIT),
)
"""Hooks by name: those of `mis_plugins.mis` by their last part, others by their dotted path."""
INIT = "--custom-megatron-init-path mis_plugins.mis.carry_versions"
LOGLINEAR = "say mis.segment_wise.method: loglinear"
HANDED = "args pg_loss train_log_probs rollout_log_probs loss_masks total_lengths response_lengths"
"""The arguments of the TIS hook that every host hands over."""
SEQUENCES = "unconcat_tokens total_lengths response_lengths"


class NeedError(MisError):
    """No address answers a need: this version of the host has moved what a hook calls."""


class Address(NamedTuple):
    """One place in a host: a module, and a name in it, or a class and its member.

    >>> Address.of("miles.utils.types:Sample.tokens")
    Address(module='miles.utils.types', names=('Sample', 'tokens'))
    """

    module: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> "Address":
        module, _, names = text.partition(":")
        return cls(module, tuple(names.split(".")))

    def __str__(self) -> str:
        return f"{self.module}:{'.'.join(self.names)}"

    def owner(self, module: Any | None) -> tuple[Any, str] | None:
        """What holds the last name in `module`, and that name; None where nothing does."""
        owner = module
        for name in self.names[:-1]:
            owner = getattr(owner, name, None)
        last = self.names[-1]
        return (owner, last) if owner is not None and hasattr(owner, last) else None


@dataclass(frozen=True)
class Need:
    """One need of our hooks.

    host: the host's title in sentences.
    what: the need in words.
    hooks: our hooks that fail without it, of `HOOKS`.
    at: addresses `module:name` or `module:Class.member`, the newest first.
    parameters: names of the parameters that a hook gives, or binds, by keyword.
    holds: local variables that a hook reads in the function's frame.
    hands: keywords that the function hands on to a hook of ours.
    ran: the place in `at` of the address that our own runs used.
    unasked: which further parameters without a default do no harm: `none` where a hook calls the function, `keywords`
        where it calls it with `more_of`, `all` where it reads the frame, or hands on what it is called with.
    """

    host: str
    what: str
    hooks: tuple[str, ...]
    at: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    hands: tuple[str, ...] = ()
    ran: int = -1
    unasked: Literal["none", "keywords", "all"] = "none"

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(map(Address.of, self.at))

    @property
    def is_loaded(self) -> bool:
        """Whether this process has loaded a module of one of the addresses."""
        return any(address.module in sys.modules for address in self.addresses)

    def get(self) -> Any:
        """Import what the need names, from the newest address that has it; raises NeedError where none has it."""
        return getattr(*self.owner())

    def owner(self) -> tuple[Any, str]:
        """The module or class that holds what the need names, and its name there; raises NeedError where none does."""
        held = self._located(_imported)
        if held is None:
            raise self.error()
        return held

    def _located(self, module_of: Callable[[str], Any | None]) -> tuple[Any, str] | None:
        owners = (address.owner(module_of(address.module)) for address in self.addresses)
        return next((owner for owner in owners if owner is not None), None)

    def loaded(self) -> Any | None:
        """What the need names, where this process runs the host; None where the host's package is not loaded.

        Raises:
            NeedError: the host's package is loaded, and no address has it.
        """
        held = self._located(sys.modules.get)
        if held is not None:
            return getattr(*held)
        package = self.addresses[0].module.partition(".")[0]
        return self.get() if package in sys.modules else None

    def of(self, instance: Any) -> Any:
        """The member of a host's instance by the newest name that it has; raises NeedError where it has none."""
        return getattr(instance, self.name_on(instance))

    def name_on(self, owner: Any) -> str:
        """The newest name under which `owner` holds what the need names; raises NeedError where it holds none."""
        for name in dict.fromkeys(address.names[-1] for address in self.addresses):
            if hasattr(owner, name):
                return name
        raise self.error()

    def frame(self) -> Mapping[str, Any]:
        """Local variables of the function further up the call stack; empty where the stack lacks it."""
        return held_by(*((address.module, address.names[-1]) for address in self.addresses))

    def error(self) -> NeedError:
        still = ", ".join(hook for hook in HOOKS if hook not in self.hooks)
        return NeedError(
            f"{self.host} has moved or dropped {self.what}, which {', '.join(self.hooks)} needs; looked at "
            f"{', '.join(self.at)}. Take a version of mis-plugins that names this version of {self.host}, or leave "
            f"the hook out. Hooks that work without it: {still}"
        )


def asked(what: str, hooks: tuple[str, ...], takes: str = "", holds: str = "", hands: str = "", **more: Any) -> Need:
    """A need at no address yet; names of parameters, variables and keywords stand in one text each."""
    return Need("", what, hooks, (), tuple(takes.split()), tuple(holds.split()), tuple(hands.split()), **more)


ASKED = {
    "tis_call": asked("the call of the TIS hook", TIS_HOOK, hands=HANDED, unasked="all"),
    "tracking": asked("its tracker", STEP, "args metrics step_key"),
    "scores": asked("log-probs of the sampled tokens", LOSS, f"logits args {SEQUENCES} with_entropy"),
    "own_loss": asked("its policy loss", BITWISE_LOSS, "args batch logits sum_of_sample_mean"),
    "log_probs": asked("its formula of log-probs", BITWISE_INIT, "logits tokens"),
    "train_actor": asked(
        "the frame of the trainer that calls the rollout-data hook",
        (*ROLLOUT, *CARRY),
        "self rollout_id rollout_data",
        holds="data_iterator num_microbatches",
        unasked="all",
    ),
    "log_prob_pass": asked(
        "the trainer's log-prob pass", (*ROLLOUT, *CARRY), "self data_iterator num_microbatches store_prefix"
    ),
    "routing_replay": asked("the replay of routes", ROUTES),
    "init": asked("the frame of the trainer that calls the init hook", CARRY, "self args role", unasked="all"),
    "weight_version": asked("the version of the trainer's weights", CARRY),
    "active_model": asked("the tag of the weights in use", CARRY),
    "switch_model": asked("the switch of weights", CARRY, "self target_tag"),
    "get_batch": asked("the micro-batch of a train step", CARRY, "data_iterator keys", unasked="all"),
    "iterator": asked("its iterator over micro-batches", CARRY, "rollout_data micro_batch_indices"),
    "conversion": asked("its conversion of samples to train data", CONVERT),
}
"""What hosts are asked for alike, by the name of the need."""


def placed(
    host: str, need: str | Need, *at: str, takes: str = "", hands: str = "", serves: tuple[str, ...] = (), ran: int = -1
) -> Need:
    """Place a need of a host, one of `ASKED` by its name or the host's own, and ask for more than `ASKED` says."""
    need = ASKED[need] if isinstance(need, str) else need
    parameters, keywords = (*need.parameters, *takes.split()), (*need.hands, *hands.split())
    hooks = (*need.hooks, *serves)
    return replace(need, host=host, hooks=hooks, at=at, parameters=parameters, hands=keywords, ran=ran)


@dataclass(frozen=True)
class Needs:
    """The needs, by name, that every host on Megatron answers."""

    tis_call: Need
    tracking: Need
    scores: Need
    own_loss: Need
    train_actor: Need
    log_prob_pass: Need
    routing_replay: Need

    def rescore(self, trainer: Any, iterators: list, counts: list[int], prefix: str, rollout_id: int) -> Any | None:
        """Log-probs by the trainer's own pass; None on a pipeline stage that computes none. Collective.

        Args:
            iterators: of each model chunk, the host's iterator over micro-batches.
            counts: the number of micro-batches of each optimizer step.
            prefix: of the key under which the pass stores what it computes.
        """
        more = {"rollout_id": rollout_id} if "rollout_id" in self.log_prob_pass.parameters else {}
        stored = self.log_prob_pass.of(trainer)(iterators, counts, store_prefix=prefix, **more)
        return stored.get(f"{prefix}log_probs")


@dataclass(frozen=True)
class Refusal:
    """An argument under which versions, or recomputed log-probs, would be wrong.

    when: whether a mapping of the host's arguments has it.
    scored: whether it matters only where the trainer scores log pi_{v+1}.
    """

    when: Callable[[Mapping[str, Any]], Any]
    message: str
    scored: bool = False


REFUSALS = (
    Refusal(
        lambda args: args.get("keep_old_actor"),
        "--keep-old-actor: log_probs are then of earlier weights than those that the version names; drop it",
    ),
    Refusal(
        lambda args: args.get("allgather_cp"),
        "--allgather-cp: tokens are then laid out otherwise than recompute reads them; drop it",
    ),
    Refusal(
        lambda args: args.get("use_rollout_routing_replay"),
        "--use-rollout-routing-replay: recompute scores without the engine's routes, and log_probs are with them; "
        f"{LOGLINEAR}",
        scored=True,
    ),
)
"""Arguments of every host under which versions would be wrong."""


@dataclass(frozen=True)
class VersionNeeds(Needs, ABC):
    """The needs of a host that says which version wrote each token, and how its answers are read.

    commit: the host, and the commit whose lines were read.
    notes: the key of a rollout that carries a note of each sample, the one key that the host packs and nobody reads.
    refusals: arguments beyond those of every host.
    asks_for_head: the argument with which the host itself asks for the engine's likeliest tokens and carries them;
        empty where it has none.
    keeps_sets: whether our hooks ask its engine for kept sets, and have its trainer score over them.
    """

    commit: ClassVar[str]
    notes: ClassVar[str]
    refusals: ClassVar[tuple[Refusal, ...]]
    asks_for_head: ClassVar[str] = ""
    keeps_sets: ClassVar[bool] = False

    init: Need
    weight_version: Need
    active_model: Need
    switch_model: Need
    get_batch: Need
    iterator: Need
    conversion: Need

    def refused(self, args: Mapping[str, Any], scored: bool) -> str | None:
        """Why `carry_versions` refuses the arguments; None where it takes them. See `Refusal` for `scored`."""
        refusals = (each for each in (*REFUSALS, *self.refusals) if scored or not each.scored)
        return next((f"{each.message}; or leave out {INIT}" for each in refusals if each.when(args)), None)

    @abstractmethod
    def version_of(self, actor: Any) -> int:
        """The version of the weights that the trainer holds."""

    @abstractmethod
    def virtual_pipeline(self, actor: Any) -> tuple[int, int]:
        """The number of model chunks of a rank, and of which number its micro-batches are a multiple."""

    @abstractmethod
    def own_routes(self, actor: Any) -> AbstractContextManager[None]:
        """Let routers route by their own gates within the block, whatever routes are recorded."""

    @abstractmethod
    def own_conversion(self, args: Any) -> Callable[[Sequence[Any]], dict[str, Any]]:
        """The host's own conversion of samples to train data.

        Raises:
            ConfigError: no process of the host's rollouts, or an argument whose conversion needs other inputs.
        """


def held_by(*functions: tuple[str, str]) -> Mapping[str, Any]:
    """Local variables of the nearest caller among these functions; empty where the stack has none of them."""
    frame = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in functions:
            return frame.f_locals
        frame = frame.f_back
    return {}


def more_of(function: Any, *sources: Any) -> dict[str, Any]:
    """Keyword-only parameters of a host's function, taken by name from the first source that has each of them.

    A host hands some settings through its own generation by parameters that came after the call was read.
    """
    parameters = inspect.signature(function).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    return {name: getattr(source, name) for name in named for source in reversed(sources) if hasattr(source, name)}


def _imported(module: str) -> Any | None:
    """A module; None where it, or a package above it, does not exist. An error inside it is the host's own."""
    if module in sys.modules:
        return sys.modules[module]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            return None
        raise
