"""The last step of a run: reported at the exit of its process, which waits for nobody."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 200  # seconds that a process may take, the import of torch included

SCRIPT = """
import atexit, logging, sys, torch, torch.distributed as dist
from types import SimpleNamespace

# After our report, which exits first: gloo's threads may abort an interpreter that ends around them.
atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
from mis_plugins import mis
from mis_plugins.correction.pipeline import correct
from mis_plugins.packing.ragged import Ragged, Ranks
from mis_plugins.config.reading import from_mapping

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
ARGS = SimpleNamespace()
ALL_BAD = {{"weight": None, "reject": [{{"over": "max", "upper": 0.5}}], "metrics": "all"}}

def step(ranks=Ranks(), **more):
    ragged = Ragged(torch.tensor([0, 2, 3]), torch.ones(3, dtype=torch.bool), ranks)
    mis.report_step(ARGS, 3, 1)
    mis.RECORDER.record(correct(torch.zeros(3), -torch.ones(3), ragged, from_mapping(ALL_BAD | more)))

{ending}
"""


def run(ending: str, *arguments: str) -> subprocess.Popen[str]:
    code = SCRIPT.format(ending=textwrap.dedent(ending))
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=None)


def told(process: subprocess.Popen[str], code: int = 0) -> str:
    out, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == code, errors
    return out


REJECTED = "rollout 3, step 1: every sequence of 1 of 1 micro-batches was rejected"
ASKED = "ASKED = SimpleNamespace(mis={'weight': {}}, use_tis=False, loss_type='policy_loss')"
# How a process ends, its exit code, and what it says exactly once.
ENDINGS: list[tuple[str, int, list[str]]] = [
    ("step()", 0, [REJECTED, "'train/mis_step/tokens': 3.0", "'train/mis_step/kept_fraction': 0.0"]),
    ("step(); mis.report_last_step(ARGS)", 0, [REJECTED, "'train/mis_step/tokens'"]),
    ("step(on_all_rejected='raise')", 0, ["ERROR:mis_plugins:the last step, reported at exit: every sequence"]),
    ("step(); raise ValueError", 1, []),
    ("step(); 1 / 0", 1, []),
    ("mis.RECORDER.flush(ARGS)", 0, []),
    (f"{ASKED}; mis.count_samples(ASKED, 0, {{'loss_masks': [torch.ones(2)]}})", 0,
     ["ERROR:mis_plugins:rollout 0, this rank: the arguments ask for a correction"]),
]  # fmt: skip


@pytest.mark.parametrize(("ending", "code", "says"), ENDINGS)
def test_the_end_of_a_process_alone(ending: str, code: int, says: list[str]):
    """A step that an exception ended is none; without the hook, or after the report of the last step, no word more."""
    out = told(run(ending), code)
    assert [out.count(text) for text in says] == [1] * len(says) and bool(out) == bool(says)


def test_a_last_report_that_raised_is_not_judged_again():
    """The step was corrected; who catches the error reads no second one, of a correction that lacked."""
    ending = """
    from mis_plugins.errors import MisError
    ARGS.mis, ARGS.use_tis, ARGS.loss_type = {"weight": {}}, True, "policy_loss"
    step(on_all_rejected="raise")
    try:
        mis.report_last_step(ARGS)
    except MisError:
        print("raised")
    """
    out = told(run(ending))
    assert "raised" in out and "no hook of mis_plugins corrected" not in out


def test_ranks_wait_for_nobody(tmp_path: Path):
    """One is gone when the other exits; each warns of its own."""
    ending = """
    import time
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.barrier()
    step(Ranks(dp=dist.group.WORLD))
    time.sleep(3 * rank)
    """
    ranks = [run(ending, str(rank), str(tmp_path / "store")) for rank in range(2)]
    first, second = map(told, ranks)
    for out in (first, second):
        assert "rollout 3, step 1, this rank: every sequence of 1 of 1 micro-batches was rejected" in out
        assert "'train/mis_step" not in out
    assert "the step's metrics are not logged" in first and "mis_plugins.mis.report_last_step(args)" in first
    assert "not logged" not in second


def test_tensor_parallel_ranks_have_nothing_to_add(tmp_path: Path):
    """They recorded the same."""
    ending = """
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    step(Ranks(tp=dist.group.WORLD))
    """
    out = told(run(ending, str(tmp_path / "store")))
    assert out.count("train/mis_step/tokens") == 1 and "this rank" not in out


def test_after_an_update_of_weights(tmp_path: Path):
    """As slime calls `--custom-update-weight-post-write-path`, on every rank: reported once, and not again at exit."""
    ending = """
    from megatron.core import parallel_state as mpu
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mpu.initialize_model_parallel()
    step(Ranks(dp=mpu.get_data_parallel_group()))
    mis.report_last_step(ARGS, "/weights/weight_v000001", [])
    """
    first, second = map(told, [run(ending, str(rank), str(tmp_path / "store")) for rank in range(2)])
    assert first.count("'train/mis_step/tokens': 6.0") == first.count("train/mis_step/tokens") == 1
    assert "every sequence of 2 of 2 micro-batches was rejected" in first
    assert "'train/mis_step" not in second and "not logged" not in first + second
