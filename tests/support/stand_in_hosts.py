"""Hosts made from their needs: modules at the addresses, and functions with the parameters, that our table names.

Bodies are small and compute: a vocabulary of eight tokens, logits that are the model's only weight, one rank. A layout
says which address of each need the host has.
"""

import pkgutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import stand_ins
import torch
from torch import Tensor

from mis_plugins.hosts.adapters.miles import NEEDS as MILES
from mis_plugins.hosts.adapters.slime import SLIME
from mis_plugins.hosts.adapters.vime import VIME
from mis_plugins.hosts.needs import Need

Data = dict[str, Any]
VOCABULARY = 8
LOSS_KEYS = ("unconcat_tokens", "total_lengths", "response_lengths", "loss_masks", "advantages", "log_probs",
             "rollout_log_probs", "rollout_mask_sums", "max_seq_lens")  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """One version of a host.

    needs: the host's table.
    modules, members: which address counts of a module's name, and of the trainer's member: 0 is the newest.
    hands_batch: whether the rollout-data hook gets the rollout's number and batch.
    arguments: makes the host's arguments, anew for each call of a hook.
    more: arguments of this version's parser that no hook of ours reads.
    """

    needs: Any
    modules: int = -1
    members: int = -1
    hands_batch: bool = True
    arguments: Callable[..., Any] = Namespace
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def later(self) -> Mapping[str, Sequence[str]]:
        """Keyword-only parameters that autumn's version added to a need's function."""
        return {"payload": ("evaluation", "kv_cache_namespace")} if self.modules == 0 else {}

    @property
    def package(self) -> str:
        return self.needs.tracking.addresses[0].module.partition(".")[0]


def typed(**settings: Any) -> Any:
    """Arguments as the newest Miles hands them: extras of a frozen record, which `vars` does not show."""
    from pydantic import BaseModel, ConfigDict

    class Arguments(BaseModel):
        model_config = ConfigDict(extra="allow", frozen=True)

    return Arguments(**settings)


LAYOUTS = {
    "August": Layout(MILES, hands_batch=False),
    "packages": Layout(MILES, modules=0, hands_batch=False),
    "new argument": Layout(MILES, modules=0, hands_batch=False, more={"tis_binary_kl_threshold": 5e-3}),
    "typed": Layout(MILES, modules=0, members=0, hands_batch=False, arguments=typed),
    "vime": Layout(VIME),
    "slime": Layout(SLIME),
}


@dataclass(frozen=True)
class Output:
    samples: Any


class Bodies:
    """What the functions of the stand-in compute, by the name of the need, and what they were asked."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.logged: list[Mapping[str, float]] = []
        self.passes: list[tuple[list[list[int]], list[int], int | None]] = []
        self.cut: tuple[int | list[list[int]], list[int]] | None = None
        alone = Namespace(size=1, rank=0, group=None)
        self.state = Namespace(
            cp=alone, tp=alone, effective_dp=alone, vpp_size=1, microbatch_group_size_per_vp_stage=None
        )
        self.replay_managers: list[Any] = []
        self.routing_replay: Any = Namespace(stage="replay_forward", enabled=True)

    # ------------------------------------------------------------------------------------------------ the loss

    def parallel(self) -> Namespace:
        return self.state

    def tracking(self, args: Any, metrics: Mapping[str, float], step_key: str) -> None:
        assert step_key in metrics
        self.logged.append(metrics)

    def scores(self, logits: Tensor, *, args: Any, unconcat_tokens: Any, total_lengths: Any, response_lengths: Any,
               with_entropy: bool, **_: Any) -> Any:  # fmt: skip
        rows = zip(logits[0].split(list(total_lengths)), unconcat_tokens, response_lengths, strict=True)
        pairs = [self._scored(row[-n - 1 : -1], tokens[-n:]) for row, tokens, n in rows]
        found = {"log_probs": [log_probs for log_probs, _ in pairs]}
        if with_entropy:
            found["entropy"] = [entropy for _, entropy in pairs]
        return found if self.layout.needs is MILES else (torch.empty(0), found)

    def _scored(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = logits.log_softmax(-1)
        return log_probs.gather(1, tokens[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)

    def kept_sets(self, args: Any, batch: Data) -> dict[str, Any]:
        return {}

    def own_loss(self, args: Any, batch: Data, logits: Tensor, sum_of_sample_mean: Any) -> tuple[Tensor, Data]:
        """PPO's clipped loss with the TIS hook behind it, summed as the hosts do."""
        keys = {name: batch[name] for name in LOSS_KEYS[:3]}
        found = self.scores(logits, args=args, with_entropy=True, **keys)
        log_probs = torch.cat((found if self.layout.needs is MILES else found[1])["log_probs"])
        ratio = (log_probs - torch.cat(batch["log_probs"])).exp()
        advantages = torch.cat(batch["advantages"])
        clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
        loss, metrics = torch.maximum(-advantages * ratio, -advantages * clipped), {}
        reduce = sum_of_sample_mean
        if args.use_tis:
            given = {"args": handed(args), "pg_loss": loss, "train_log_probs": batch["log_probs"], "max_seq_lens": None,
                     "parallel_state": self.state, **{name: batch.get(name) for name in LOSS_KEYS[1:]}}  # fmt: skip
            hook = pkgutil.resolve_name(args.custom_tis_function_path)
            loss, masks, told = hook(**{name: given[name] for name in self.layout.needs.tis_call.hands})
            metrics = {name: sum_of_sample_mean(value) for name, value in told.items()}
            reduce = self.reducer({**batch, "loss_masks": masks})
        return reduce(loss), metrics

    def reducer(self, batch: Data) -> Callable[[Tensor], Tensor]:
        """The hosts' sum over samples of masked means, divided by the sums of before any rejection that a batch has."""
        masks, lengths = batch["loss_masks"], batch["response_lengths"]
        sums = batch.get("rollout_mask_sums") or [mask.sum() for mask in masks]

        def sum_of_sample_mean(x: Tensor) -> Tensor:
            rows = zip(x.split(list(lengths)), masks, sums, strict=True)
            return torch.stack([(row * mask).sum() / divisor.clamp(min=1) for row, mask, divisor in rows]).sum()

        sum_of_sample_mean.__module__ = f"{self.layout.package}.backends.reducers"
        return sum_of_sample_mean

    # --------------------------------------------------------------------------------------- formulas of log-probs

    def log_probs(self, logits: Tensor, tokens: Tensor, **_: Any) -> Any:
        found = self._scored(logits.double(), tokens)[0].float()
        return found if self.layout.needs is MILES else (found[:, None], None)

    def responses(self, logits: Tensor, unconcat_tokens: Any, response_lengths: Any, **_: Any) -> Iterator[Any]:
        (tokens,), (n,) = unconcat_tokens, response_lengths
        yield logits[0, :n].to(torch.bfloat16), tokens[:n]

    def log_probs_and_entropy(self, logits: Tensor, tokens: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self._scored(logits, tokens)[0], None

    # --------------------------------------------------------------------------------------------------- the trainer

    def init(self, actor: Any, args: Any, role: str) -> None:
        actor.args, actor.role, actor.version, actor.tag = args, role, 1, "actor"
        actor.logits = torch.linspace(-1, 1, VOCABULARY)
        actor.sizes = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        if args.custom_megatron_init_path:
            pkgutil.resolve_name(args.custom_megatron_init_path)(handed(args))

    def weight_version(self, actor: Any) -> int:
        return actor.version

    def active_model(self, actor: Any) -> str:
        return actor.tag

    def parallel_config(self, actor: Any) -> dict[str, int]:
        return actor.sizes

    def switch_model(self, actor: Any, target_tag: str) -> None:
        actor.tag = target_tag

    def replay_stage(self, actor: Any, stage: str) -> None:
        self.routing_replay.stage = stage

    def log_prob_pass(self, actor: Any, data_iterator: Any, num_microbatches: Any, store_prefix: str,
                      rollout_id: Any = None) -> dict[str, list[Tensor]]:  # fmt: skip
        """Log-probs under the trainer's weights, plus `leak` a neighbour; dynamic batches have the samples' order."""
        iterator, rows = data_iterator[0], list[tuple[int, Tensor]]()
        self.passes.append((iterator.groups, num_microbatches, rollout_id))
        data = iterator.rollout_data
        for group in iterator.groups:
            for i in group:
                logits = (actor.logits * actor.version).expand(data["total_lengths"][i], -1)
                n = data["response_lengths"][i]
                found = self._scored(logits[-n - 1 : -1], data["tokens"][i][-n:])[0]
                rows.append((i, found + getattr(actor, "leak", 0.0) * (len(group) - 1)))
        ordered = sorted(dict(rows).items()) if actor.args.use_dynamic_batch_size else rows
        return {f"{store_prefix}log_probs": [row for _, row in ordered]}

    def micro_batches(self, actor: Any, data: Data) -> tuple[list[Any], list[int]]:
        """An iterator, and how many micro-batches each step has: two of one step, unless a test says how to cut."""
        groups, numbers = self.cut or ([[0, 1], [*range(2, len(data["tokens"]))]], [2])
        given = (groups, None) if isinstance(groups, int) else (None, groups)
        return [self.iterator(data, *given)], numbers

    def train_actor(self, actor: Any, rollout_id: int, data: Data, iterators: list[Any], numbers: list[int]) -> Any:
        """Log-probs, the rollout-data hook, the step hook, and a loss a micro-batch: losses and what they told.

        Miles's trainers without Megatron call neither hook, and ask for no sums over masks: `_train_core`, `TRAIN_KEYS`
        of `miles/backends/training_utils/torch_native/actor.py` at 044f7c8ce, read for FSDP and torchtitan.
        """
        args, batches = actor.args, []
        data.update(self.layout.needs.log_prob_pass.of(actor)(iterators, numbers, store_prefix=""))
        on_megatron = args.train_backend == "megatron"
        keys = LOSS_KEYS if on_megatron else tuple(key for key in LOSS_KEYS if key != "rollout_mask_sums")
        if args.rollout_data_postprocess_path and on_megatron:
            batch = (rollout_id, data) if self.layout.hands_batch else ()
            pkgutil.resolve_name(args.rollout_data_postprocess_path)(handed(args), *batch)
        if args.custom_megatron_before_train_step_hook_path and on_megatron:
            hook = pkgutil.resolve_name(args.custom_megatron_before_train_step_hook_path)
            hook(handed(args), rollout_id, 0, [], None, None)
        loss_of = (
            pkgutil.resolve_name(args.custom_loss_function_path)
            if args.loss_type == "custom_loss"
            else self.layout.needs.own_loss.get()
        )
        found = getattr(self.layout.needs, "get_batch", None)
        get_batch = self.get_batch if found is None else found.get()
        for group in iterators[0].groups:
            iterators[0].group = group
            batch = get_batch(iterators[0], keys)
            logits = torch.cat([(actor.logits * actor.version).expand(n, -1) for n in batch["total_lengths"]])[None]
            batches.append(loss_of(handed(args), batch, logits.clone().requires_grad_(), self.reducer(batch)))
        return batches

    def get_batch(self, data_iterator: Any, keys: Sequence[str]) -> Data:
        data, group = data_iterator.rollout_data, data_iterator.group
        named = {key: data.get("tokens" if key == "unconcat_tokens" else key) for key in keys}
        return {key: None if rows is None else [rows[i] for i in group] for key, rows in named.items()}

    class iterator:
        def __init__(self, rollout_data: Data, micro_batch_size: Any = None, micro_batch_indices: Any = None) -> None:
            self.rollout_data, self.micro_batch_size = rollout_data, micro_batch_size
            self.micro_batch_indices = micro_batch_indices

        @property
        def groups(self) -> list[list[int]]:
            """The samples of each micro-batch."""
            samples = [*range(len(self.rollout_data["tokens"]))]
            size = self.micro_batch_size
            return self.micro_batch_indices or [samples[i : i + size] for i in samples[::size]]

    # -------------------------------------------------------------------------------------------------- the rollouts

    async def single_turn(self, input: Any) -> Output:
        return Output("the host's own")

    def prompt_ids(self, state: Any, sample: Any) -> list[int]:
        return [7, 6]

    def payload(self, args: Any, input_ids: Any, sampling_params: Any, multimodal_inputs: Any = None, *,
                evaluation: bool = False, kv_cache_namespace: str | None = None) -> Any:  # fmt: skip
        return {"input_ids": input_ids, "extra_key": kv_cache_namespace, "evaluation": evaluation}, None

    def headers(self, args: Any, sample: Any) -> None:
        return None

    async def update_sample(self, args: Any, sample: Any, payload: Any, output: Any) -> None:
        rows = output["meta_info"]["output_token_logprobs"]
        sample.payload, sample.tokens = payload, [*payload["input_ids"], *(row[1] for row in rows)]
        sample.response_length, sample.rollout_log_probs = len(rows), [row[0] for row in rows]
        sample.weight_versions.append(
            Namespace(spans=[Namespace(**span) for span in output["meta_info"]["weight_versions"]])
            if self.layout.modules == 0
            else output["meta_info"]["weight_version"]
        )

    def conversion(self, args: Any, samples: Any, **_: Any) -> Data:
        return data_of(samples) | {"weight_versions": [sample.weight_versions for sample in samples]}


def handed(args: Any) -> Any:
    """Arguments as a hook gets them: the newest Miles makes a new record for each call."""
    return args.model_copy() if hasattr(args, "model_copy") else args


def data_of(samples: Sequence[Any]) -> Data:
    """A rollout of samples as the trainer gets it."""
    masks = [torch.ones(sample.response_length, dtype=torch.int) for sample in samples]
    return {
        "tokens": [torch.tensor(sample.tokens) for sample in samples],
        "total_lengths": [len(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rollout_log_probs": [torch.tensor(sample.rollout_log_probs) for sample in samples],
        "loss_masks": masks,
        "rollout_mask_sums": torch.stack([mask.sum() for mask in masks]).float(),
        "advantages": [torch.ones(sample.response_length) for sample in samples],
        "sample_indices": list(range(len(samples))),
    }


def trainer(host: Bodies) -> Any:
    """The class of the host's trainer."""
    address = host.layout.needs.train_actor.addresses[0]
    return getattr(sys.modules[address.module], address.names[0])


def load(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Bodies:
    """Load the modules of one version of a host until the test ends."""
    bodies, modules = Bodies(layout), dict[str, dict[str, Any]]()
    for name, need in vars(layout.needs).items():
        member = len(need.addresses[0].names) > 1
        address = need.addresses[layout.members if member else layout.modules]
        module = modules.setdefault(address.module, {"__name__": address.module, "BODIES": bodies, "Output": Output})
        owner, last = module, address.names[-1]
        if member:
            owner = module.setdefault("CLASSES", {}).setdefault(address.names[0], {})
        made = {} if need.hands else _made(name, last, need, member, module)
        owner.update(made)
    for module in modules.values():
        module.update({name: type(name, (), body) for name, body in module.pop("CLASSES", {}).items()})
    stand_ins.load(modules, monkeypatch)
    return bodies


def _made(name: str, last: str, need: Need, member: bool, module: dict[str, Any]) -> dict[str, Any]:
    """What the need names: a function with the table's parameters, a member of the trainer, or a value."""
    body = getattr(module["BODIES"], name, None)
    if isinstance(body, type) or not callable(body):
        return {last: body}
    if member and not need.parameters:
        return {last: MEMBERS.get(last, lambda read: property(read))(body)}
    scope: dict[str, Any] = {}
    more = module["BODIES"].layout.later.get(name, ())
    exec(compile(_source(name, last, need, more), f"<{need.host}: {last}>", "exec"), module, scope)
    return scope


MEMBERS: dict[str, Callable[[Any], Any]] = {
    "weight_updater": lambda read: property(lambda self: Namespace(weight_version=read(self))),
    "_get_actor_weight_version": lambda read: lambda self: read(self),
}


def _source(name: str, last: str, need: Need, later: Sequence[str]) -> str:
    """A function of the table's parameters that calls the body; keyword-only ones that came later may follow."""
    given = ", ".join(need.parameters)
    if name == "single_turn":
        return f"async def {last}({given}) -> Output:\n    return await BODIES.single_turn({given})\n"
    if need.holds:
        held, passed = ", ".join(need.holds), ", ".join((*need.parameters, *need.holds))
        made = f"    {held} = BODIES.micro_batches(self, rollout_data)\n"
        return f"def {last}({given}):\n{made}    return BODIES.{name}({passed})\n"
    named = [one if one == "self" else f"{one}={one}" for one in (*need.parameters, *later)]
    after = ("*", *(f"{one}=None" for one in later)) if later else ()
    given = ", ".join((*(one if one == "self" else f"{one}=None" for one in need.parameters), *after))
    return f"def {last}({given}):\n    return BODIES.{name}({', '.join(named)})\n"
