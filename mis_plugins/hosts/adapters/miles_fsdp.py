"""Miles on FSDP: every response whole on its rank."""

from dataclasses import replace
from functools import partial
from typing import Any

from mis_plugins.errors import InputError
from mis_plugins.hosts import megatron
from mis_plugins.hosts.adapters import miles
from mis_plugins.hosts.adapters.miles import NEEDS
from mis_plugins.hosts.host import Ranks

USE_CP = "use --custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp"
IF_CUT = f"if context parallelism splits the responses, {USE_CP}"


def ranks(parallel_state: Any | None) -> Ranks:
    """The data-parallel group, where one is handed; raises InputError where context-parallel ranks share responses."""
    from mis_plugins.packing.ragged import Ranks

    if parallel_state is None:
        return Ranks()
    size = parallel_state.cp.size
    if size > 1:
        raise InputError(f"compute_mis_weights_fsdp: context parallel responses, over {size} ranks; {USE_CP}")
    return megatron.handed(parallel_state)[0]


def divides_by_kept(args: Any) -> bool:
    """Whether this host divides a sequence's loss by the tokens that the returned mask keeps.

    False with a reducer of the user's, and with --calculate-per-token-loss, where no mask divides the loss. False too
    where the micro-batch has `rollout_mask_sums`, by which Megatron's trainer divides. Miles's loss holds the
    micro-batch while it calls the TIS hook; before a job, and in releases without that function, none has them.
    """
    if getattr(args, "calculate_per_token_loss", False):
        return False
    batch = NEEDS.tis_call.frame().get("batch", {})
    by_sums = batch.get("rollout_mask_sums") is not None
    return not by_sums and getattr(args, "custom_pg_loss_reducer_function_path", None) is None


HOST = replace(
    miles.HOST,
    name="fsdp",
    title="Miles on FSDP",
    runs=partial(miles.trains_on, "fsdp"),
    told_by="arguments",  # slime's parser has --train-backend too
    divides_by_kept=divides_by_kept,
    megatron=False,
    records=("miles", "miles-fsdp", "sglang"),
    config_files=("config",),
    tis_hook="mis_plugins.mis.compute_mis_weights_fsdp",
    step_hook=False,
    version_flags="",
    head_flags="",
    rollout_batch=False,
    rescore=None,
    routers=False,
)
