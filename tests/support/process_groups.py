"""Process groups of a test process: what one file leaves behind, ranks that a later file forks would inherit."""

import sys

import torch.distributed as dist


def destroy_process_groups() -> None:
    """All of them. Megatron-core 0.16.1 keeps two, whose threads a forked rank would wait for without end."""
    if not dist.is_initialized():
        return
    mpu = sys.modules.get("megatron.core.parallel_state")
    if mpu is not None and mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
        for name in [name for name, value in vars(mpu).items() if isinstance(value, dist.ProcessGroup)]:
            setattr(mpu, name, None)
    dist.destroy_process_group()
