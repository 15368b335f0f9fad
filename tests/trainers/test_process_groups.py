"""Ranks can be forked from a process that trained in Megatron, once its groups are gone."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import signal
from megatron.core import parallel_state as mpu
from torch.distributed import barrier
from lab.host.train.parallel import initialize, launch
from process_groups import destroy_process_groups
from true_on_policy.trainers.megatron import one_rank

one_rank()
destroy_process_groups()
assert not mpu.model_parallel_is_initialized()


def rank():
    signal.alarm(60)  # ends it where it waits
    initialize(1, 1)
    barrier()  # a rank that is done may not exit while the other still connects its last group


raise SystemExit(launch(2, rank))
"""


def test_a_rank_that_is_forked_later_waits_for_none_of_them():
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests' / 'support'}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment, timeout=200)
