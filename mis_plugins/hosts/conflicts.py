"""Combinations of a host's settings that spoil a replay of the engine's routes, or a correction.

The hook that watches routers and `config check --host` look for all conflicts, in the host's arguments and in the keys
of a file. The TIS hook and the loss hook look for conflicts that spoil weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import view
from mis_plugins.errors import ConfigError
from mis_plugins.hosts.arguments import kinds
from mis_plugins.hosts.host import Host

REPLAY = "use_rollout_routing_replay"


@dataclass(frozen=True)
class Setting:
    """What is set: the host's arguments by name, and the config beside them.

    keys: an absent argument is unknown; None and false are values that the host has.
    """

    keys: Mapping[str, Any]
    config: CorrectionConfig

    @property
    def replays(self) -> bool:
        return bool(self.keys.get(REPLAY))

    @property
    def reads_routes(self) -> bool:
        """Whether the config needs the engine's routes."""
        return self.config.reads_routes or self.config.routing is not None


@dataclass(frozen=True)
class Conflict:
    """Settings that contradict each other.

    arguments: names that the host's parser must have for the conflict to arise.
    holds: whether the settings conflict.
    text: what happens, and what to change; `{host}` stands for the host's title.
    refused: whether the numbers would be wrong; otherwise they are only worse, or the engine may stop.
    spoils_weights: whether every importance weight would be wrong, with or without a replay of routes.
    serves: called with a host and its arguments by name; whether that host is safe from the conflict.
    """

    arguments: tuple[str, ...]
    holds: Callable[[Setting], bool]
    text: str
    refused: bool = True
    spoils_weights: bool = False
    serves: Callable[[Host, Mapping[str, Any]], bool] = lambda host, keys: False

    def told(self, host: Host) -> str:
        """Tell the conflict to somebody who runs a host."""
        return self.text.format(host=host.title)


def _top_p_cuts(setting: Setting) -> bool:
    top_p = setting.keys.get("rollout_top_p")
    return isinstance(top_p, int | float) and top_p < 1 and setting.config.reads_behavior


def _top_k_cuts(setting: Setting) -> bool:
    top_k = setting.keys.get("rollout_top_k")
    return isinstance(top_k, int) and top_k > 0 and setting.config.reads_behavior


def _chunks_cut(setting: Setting) -> bool:
    """Whether a prompt may be cut into chunks, or be larger than what SGLang keeps routes of."""
    size, longest = (
        setting.keys.get(key) for key in ("sglang_chunked_prefill_size", "rollout_max_context_len")
    )
    if not setting.replays or not isinstance(size, int):
        return False
    return size <= 0 or not isinstance(longest, int) or size < longest


CONFLICTS: dict[str, Conflict] = {
    "fused router": Conflict(
        (REPLAY, "moe_router_fusion"),
        lambda setting: setting.replays and bool(setting.keys.get("moe_router_fusion")),
        "moe_router_fusion: the fused router of megatron-core returns before the replay, so that no route of the "
        "engine is used; leave it out with use_rollout_routing_replay",
    ),
    "replay in the file alone": Conflict(
        (REPLAY, "use_routing_replay"),
        lambda setting: setting.replays and not setting.keys.get("use_routing_replay"),
        "use_rollout_routing_replay: the host derives use_routing_replay before it reads the file, so that the engine "
        "returns its routes and the trainer replays none; give --use-rollout-routing-replay, or set "
        "use_routing_replay: true beside it",
    ),
    "routes not asked": Conflict(
        (REPLAY,),
        lambda setting: setting.reads_routes and setting.keys.get(REPLAY, True) in (False, None),
        "use_rollout_routing_replay: false does not ask the engine for its routes, which statistic: route and "
        "mis.routing compare with; give --use-rollout-routing-replay (and mis.routing.experts: trainer, where routers "
        "shall use their own gates)",
    ),
    "hierarchical cache": Conflict(
        (REPLAY, "sglang_enable_hierarchical_cache"),
        lambda setting: setting.replays and bool(setting.keys.get("sglang_enable_hierarchical_cache")),
        "sglang_enable_hierarchical_cache: SGLang keeps routes by place in the device cache, and returns those of "
        "other tokens for a prefix that comes back from the host cache (sglang#26975); leave it out with "
        "use_rollout_routing_replay",
    ),
    "chunked prefill": Conflict(
        (REPLAY, "sglang_chunked_prefill_size"),
        _chunks_cut,
        "sglang_chunked_prefill_size: at the border of two chunks SGLang up to 0.5.23 can return rows of an earlier "
        "forward (sglang#36404), and with -1 a long prompt stops it (sglang#26860); give rollout_max_context_len, and "
        "a size that is no smaller",
        refused=False,
    ),
    "speculation": Conflict(
        (REPLAY, "sglang_speculative_algorithm"),
        lambda setting: setting.replays and bool(setting.keys.get("sglang_speculative_algorithm")),
        "sglang_speculative_algorithm: beside a replay of routes, speculation has raised the difference of log-probs "
        "(miles#1186); compare route_strange and route_kl_k3 with a run without it",
        refused=False,
    ),
    "gate dtype": Conflict(
        (REPLAY, "moe_router_dtype"),
        lambda setting: (
            (setting.replays or setting.reads_routes)
            and setting.keys.get("moe_router_dtype") in ("fp32", "fp64")
        ),
        "moe_router_dtype: the trainer computes its gates in it, and SGLang 0.5.23 those of Qwen2-MoE and Qwen3-MoE in "
        "the dtype of the model; leave it out for them, since a replay hands over experts and not their probabilities",
        refused=False,
    ),
    "top-p": Conflict(
        ("rollout_top_p",),
        _top_p_cuts,
        "rollout_top_p: the engine samples from the tokens that top-p leaves, and {host} does not hand them to the "
        "trainer, so that every importance ratio would be wrong; set rollout_top_p: 1.0",
        spoils_weights=True,
        serves=lambda host, keys: host.kept_set(keys),
    ),
    "top-k": Conflict(
        ("rollout_top_k",),
        _top_k_cuts,
        "rollout_top_k: the engine samples from the tokens that top-k leaves, and {host} does not hand them to the "
        "trainer, so that every importance ratio would be wrong; set rollout_top_k: -1 (slime hands them on beside a "
        "rollout_top_p below 1: set both in this file)",
        spoils_weights=True,
        serves=lambda host, keys: host.kept_set(keys),
    ),
}
"""By a short name for tests and readers."""
SPOIL_WEIGHTS = tuple(conflict for conflict in CONFLICTS.values() if conflict.spoils_weights)


def check(keys: Mapping[str, Any], config: CorrectionConfig, host: Host) -> None:
    """Refuse settings with which a job would run and its numbers would be wrong.

    Raises:
        ConfigError: it quotes the argument.
    """
    refused = (conflict for conflict in CONFLICTS.values() if conflict.refused)
    _refuse(_found(refused, keys, config, host), host)


def check_weights(args: Any, config: CorrectionConfig, host: Host) -> None:
    """Refuse a job whose every importance weight would be wrong, in a hook that is handed the host's arguments.

    Raises:
        ConfigError: it quotes the argument.
    """
    _refuse(_found(SPOIL_WEIGHTS, view(args), config, host), host)


def warnings(keys: Mapping[str, Any], config: CorrectionConfig, host: Host) -> Iterator[str]:
    """Settings that make numbers worse, or may stop the engine."""
    told = (conflict for conflict in CONFLICTS.values() if not conflict.refused)
    return (conflict.told(host) for conflict in _found(told, keys, config, host))


def _refuse(conflicts: Iterator[Conflict], host: Host) -> None:
    conflict = next(conflicts, None)
    if conflict:
        raise ConfigError(conflict.told(host))


def _found(
    conflicts: Iterable[Conflict], keys: Mapping[str, Any], config: CorrectionConfig, host: Host
) -> Iterator[Conflict]:
    setting, known = Setting(keys, config), kinds(host)
    for conflict in conflicts:
        possible = known.keys() >= set(conflict.arguments) and not conflict.serves(host, keys)
        if possible and conflict.holds(setting):
            yield conflict
