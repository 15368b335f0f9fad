"""Miles on torchtitan: logits of whole responses reach the loss, cut over the vocabulary alone.

torchtitan cuts sequences over context-parallel ranks and joins their logits before the loss, so that `parallel_state`
says context parallelism 1 (`torchtitan_utils/parallel.py` at 9edf85d1d, `loss.py` at 5e9a1cb97). Its loop, which is
that of autumn's Miles on FSDP too, calls neither the rollout-data hook nor Megatron's
(`training_utils/torch_native/actor.py` at 044f7c8ce).
"""

from dataclasses import replace
from functools import partial

from mis_plugins.hosts.adapters import miles, miles_fsdp
from mis_plugins.hosts.host import OWN_HEAD_FLAGS

HOST = replace(
    miles_fsdp.HOST,
    name="torchtitan",
    title="Miles on torchtitan",
    runs=partial(miles.trains_on, "torchtitan"),
    records=("miles", "miles-fsdp", "miles-torchtitan", "sglang"),
    tis_hook=miles.HOST.tis_hook,
    head_flags=OWN_HEAD_FLAGS,
)
