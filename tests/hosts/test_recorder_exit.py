"""The last step of a run: reported at the exit of its process, which waits for nobody."""

import pytest
from forks import Ended, ended

BEGINNING = """
import atexit, logging, sys, time, torch, torch.distributed as dist
from types import SimpleNamespace

# After our report, which exits first: gloo's threads may abort an interpreter that ends around them.
atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
from mis_plugins import mis
from mis_plugins.correction.pipeline import correct
from mis_plugins.errors import MisError
from mis_plugins.packing.ragged import Ragged, Ranks
from mis_plugins.config.reading import from_mapping

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
ARGS = SimpleNamespace()
ALL_BAD = {"weight": None, "reject": [{"over": "max", "upper": 0.5}], "metrics": "all"}

def step(ranks=Ranks(), **more):
    ragged = Ragged(torch.tensor([0, 2, 3]), torch.ones(3, dtype=torch.bool), ranks)
    mis.report_step(ARGS, 3, 1)
    mis.RECORDER.record(correct(torch.zeros(3), -torch.ones(3), ragged, from_mapping(ALL_BAD | more)))

def join(store, rank, world):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
"""
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
CAUGHT = """
ARGS.mis, ARGS.use_tis, ARGS.loss_type = {"weight": {}}, True, "policy_loss"
step(on_all_rejected="raise")
try:
    mis.report_last_step(ARGS)
except MisError:
    print("raised")
"""
# Of ranks, how many they are, and how one ends that has joined the others.
UNEQUAL = (2, "dist.barrier(); step(Ranks(dp=dist.group.WORLD)); time.sleep(3 * dist.get_rank())")
TENSOR_PARALLEL = (1, "step(Ranks(tp=dist.group.WORLD))")
AFTER_AN_UPDATE = (2, """
from megatron.core import parallel_state as mpu
mpu.initialize_model_parallel()
step(Ranks(dp=mpu.get_data_parallel_group()))
mis.report_last_step(ARGS, "/weights/weight_v000001", [])
""")  # fmt: skip
Processes = dict[str, list[Ended]]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    """How the processes of this file ended, by their script; ranks in their order."""
    folder = tmp_path_factory.mktemp("ended")
    scripts = {script: [script] for script in [*(ending for ending, *_ in ENDINGS), CAUGHT]}
    for number, (world, script) in enumerate((UNEQUAL, TENSOR_PARALLEL, AFTER_AN_UPDATE)):
        store = str(folder / f"store-{number}")
        scripts[script] = [f"join({store!r}, {rank}, {world})\n{script}" for rank in range(world)]
    each = iter(ended(sum(scripts.values(), []), folder, BEGINNING))
    return {script: [next(each) for _ in copies] for script, copies in scripts.items()}


def told(processes: Processes, script: str, code: int = 0) -> list[str]:
    """What each process wrote that ran this script."""
    assert [process.code for process in processes[script]] == [code] * len(processes[script]), processes[script]
    return [process.out for process in processes[script]]


@pytest.mark.parametrize(("ending", "code", "says"), ENDINGS)
def test_the_end_of_a_process_alone(ending: str, code: int, says: list[str], processes: Processes):
    """A step that an exception ended is none; without the hook, or after the report of the last step, no word more."""
    (out,) = told(processes, ending, code)
    assert [out.count(text) for text in says] == [1] * len(says) and bool(out) == bool(says)


def test_a_last_report_that_raised_is_not_judged_again(processes: Processes):
    """The step was corrected; who catches the error reads no second one, of a correction that lacked."""
    (out,) = told(processes, CAUGHT)
    assert "raised" in out and "no hook of mis_plugins corrected" not in out


def test_ranks_wait_for_nobody(processes: Processes):
    """One is gone when the other exits; each warns of its own."""
    first, second = told(processes, UNEQUAL[1])
    for out in (first, second):
        assert "rollout 3, step 1, this rank: every sequence of 1 of 1 micro-batches was rejected" in out
        assert "'train/mis_step" not in out
    assert "the step's metrics are not logged" in first and "mis_plugins.mis.report_last_step(args)" in first
    assert "not logged" not in second


def test_tensor_parallel_ranks_have_nothing_to_add(processes: Processes):
    """They recorded the same."""
    (out,) = told(processes, TENSOR_PARALLEL[1])
    assert out.count("train/mis_step/tokens") == 1 and "this rank" not in out


def test_after_an_update_of_weights(processes: Processes):
    """As slime calls `--custom-update-weight-post-write-path`, on every rank: reported once, and not again at exit."""
    first, second = told(processes, AFTER_AN_UPDATE[1])
    assert first.count("'train/mis_step/tokens': 6.0") == first.count("train/mis_step/tokens") == 1
    assert "every sequence of 2 of 2 micro-batches was rejected" in first
    assert "'train/mis_step" not in second and "not logged" not in first + second
