"""What the rollout-data hooks leave in this process for the hooks of the steps that follow.

Nothing is left on the host's arguments, which may be frozen, and made anew for each call.
"""

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import view
from mis_plugins.errors import ConfigError, InputError, warn_once

HOOK = "rollout_data_postprocess_path"


@dataclass(frozen=True)
class Counted:
    """The host's mean of a metric that is 1 at every token, for each optimizer step of a rollout."""

    rollout_id: int
    shares: Float[Tensor, " steps"]

    def share(self, step: tuple[int, int] | None) -> Float[Tensor, ""] | None:
        """Share of the step that trains now; None where a rollout has several and nothing says which.

        A rollout may have more steps than the host's arguments promise, and its further steps have no known share.
        """
        if len(self.shares) == 1:
            return self.shares[0]
        if step is None or step[0] != self.rollout_id:
            return None
        return self.shares[step[1]] if step[1] < len(self.shares) else None


@dataclass(frozen=True)
class Held:
    """The numbers of one rollout.

    asked: the config that the arguments carry; None where they carry none that can be read.
    counted: shares of the steps that train; None on a rank without log-probs.
    config: the config of `normalize_rollout`; None where the mean was not asked for.
    mean: the mean weight under `config`; None on a rank without log-probs.
    """

    rollout_id: int
    asked: CorrectionConfig | None
    counted: Counted | None
    config: CorrectionConfig | None = None
    mean: Float[Tensor, ""] | None = None


@dataclass
class RolloutStore:
    """The numbers of the rollout that the last rollout-data hook saw.

    training: the rollout that trains, where the step hook has said so since.
    """

    held: Held | None = None
    training: int | None = None

    def keep(self, held: Held) -> None:
        """Hold the numbers of a rollout, and forget the numbers of the rollout or the attempt before.

        A mean stays where the other hook counts the same rollout behind `normalize_rollout`.
        """
        last = self.held
        if held.config is None and last and (last.rollout_id, last.asked) == (held.rollout_id, held.asked):
            held = replace(held, config=last.config, mean=last.mean)
        self.held, self.training = held, None

    def begin(self, rollout_id: int) -> None:
        """Note on every rank which rollout trains; raises InputError on each where the mean is of an older rollout."""
        self.training = rollout_id
        if self._is_older() and self.held and self.held.config:
            raise InputError(
                f"mis.weight.normalize.scope: rollout: rollout {rollout_id} trains, and the mean is that of rollout "
                f"{self.held.rollout_id}: the host did not call --{HOOK.replace('_', '-')} for this rollout"
            )

    def mean(self, args: Any, config: CorrectionConfig) -> Tensor | None:
        """The mean weight of the rollout; None without one, or where `config` reads none.

        Raises:
            InputError: the mean was computed under another config, or is of other weights than the micro-batch's.
        """
        normalize = config.weight and config.weight.normalize
        held = self._of_this_run(args)
        if not normalize or normalize.scope != "rollout" or held is None or held.mean is None:
            return None
        assert held.config is not None
        if held.config.segment_wise_on != config.segment_wise_on:
            here, there = "the micro-batch", "rollout_data"
            has, lacks = (here, there) if config.segment_wise_on else (there, here)
            raise InputError(
                f"proximal_version: of {has}, and not of {lacks}, whose mean with mis.weight.normalize.scope: rollout "
                "is of other weights; hand it on with both, or use scope: data_parallel, as beside carry_versions"
            )
        if _parts(held.config) != _parts(config):
            raise InputError(
                "mis.weight.normalize.scope: rollout: the mean was computed under another config than this "
                f"micro-batch has: {_parts(held.config)}; hand one config to both"
            )
        return held.mean

    def counted(self, args: Any) -> Counted | None:
        """Shares of the steps that train; None where they are not known for the rollout that trains."""
        held = self._of_this_run(args)
        if held is None or held.asked not in (None, asked(args)):  # an earlier run of this process left it
            return None
        if self._is_older():
            warn_once(
                f"rollout {self.training} trains, and samples were counted for rollout {held.rollout_id} alone: the "
                "host has not called the rollout-data hook since, and metrics are averaged as without it"
            )
            return None
        return held.counted

    def _is_older(self) -> bool:
        return self.held is not None and self.training is not None and self.training > self.held.rollout_id

    def _of_this_run(self, args: Any) -> Held | None:
        """The numbers held; None where the arguments name no rollout-data hook, as an earlier run left the numbers."""
        given = view(args)
        return None if HOOK in given and given[HOOK] is None else self.held


def asked(args: Any) -> CorrectionConfig | None:
    """The config that the arguments carry; None where they carry none that can be read."""
    try:
        return reading.from_args(args)
    except ConfigError:
        return None


def _parts(config: CorrectionConfig) -> str:
    """The parts of a config on which a mean weight depends."""
    return ", ".join(f"{name} {getattr(config, name)}" for name in ("weight", "reject", "aggregate", "segment_wise"))


ROLLOUT = RolloutStore()
