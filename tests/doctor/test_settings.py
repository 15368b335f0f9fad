"""What is seen of this process, and the file that a trainer writes of it."""

import enum
import importlib.metadata
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import stand_ins
import torch
from commands import ran

from mis_plugins.hosts.adapters.miles import NEEDS
from true_on_policy.bitwise import first_mismatch
from true_on_policy.contract.gpu import ENVIRONMENT, gpu_contract, model_contract
from true_on_policy.contract.settings import CHOSEN, FUSED, Setting
from true_on_policy.errors import NotSeenError, PinError
from true_on_policy.flags.command import launch_flags
from true_on_policy.kernels.probes import Failure
from true_on_policy.observe import process
from true_on_policy.observe.process import (
    KERNELS,
    LOOKS,
    PRODUCTS,
    chosen,
    first_failure,
    fused_of_host,
    looked,
    observe,
)

CONTRACT = model_contract("qwen3-4B", "megatron", trainer_tp=2, engine_tp=8, context_parallel=4)
HOST = Namespace(
    sglang_true_on_policy_contract="qwen3_dense_true_on_policy_v1",
    sglang_enable_deterministic_inference=True,
    recompute_logprobs_via_prefill=True,
    true_on_policy_mode=True,
    tensor_model_parallel_size=2,
    context_parallel_size=4,
    rollout_temperature=1.0,
    rollout_top_p=0.95,
    rollout_top_k=-1,
)


def test_versions_are_those_that_are_installed() -> None:
    seen = observe(CONTRACT).settings
    assert seen["torch"] == torch.__version__
    assert seen["Megatron-core"] == importlib.metadata.version("megatron-core")
    assert seen["Transformer Engine"] == "absent"


def test_what_the_host_decides() -> None:
    seen = observe(CONTRACT, HOST).settings
    told = {"tensor parallel": "2", "context parallel": "4", "temperature": "1", "top-p": "0.95", "top-k": "-1"}
    told |= {"seeds of a prompt's samples": "one each", "log-probs come from": "prefill", "log-softmax": "bf16"}
    assert told.items() <= seen.items() and seen["contract"] == "qwen3_dense_true_on_policy_v1"
    bare = observe(CONTRACT, Namespace()).settings
    assert (bare["seeds of a prompt's samples"], bare["log-probs come from"], bare["log-softmax"]) == (
        "not sent",
        "decode",
        "fp32",
    )
    assert "temperature" not in bare


def test_the_environment_is_this_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    seen = observe(CONTRACT).settings
    assert (seen["NCCL_ALGO"], seen["NVTE_ALLOW_NONDETERMINISTIC_ALGO"]) == ("Tree", "unset")
    assert set(ENVIRONMENT) < set(seen)


def test_tf32_is_tried_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As TF32 would: 10 bits of mantissa."""
    monkeypatch.setattr(process, "device", lambda: torch.device("cpu"))
    assert LOOKS["TF32"]() == "off"
    exact = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda x, y: (exact(x, y) * 2**10).round() / 2**10)
    assert LOOKS["TF32"]() == "on"


@pytest.mark.parametrize(("disable", "found"), [("0", "on"), ("1", "off")])
def test_compiling_is_tried_not_read(disable: str, found: str) -> None:
    code = "from true_on_policy.observe.process import LOOKS\nprint(LOOKS['torch.compile']())"
    done = ran("-c", code, TORCH_COMPILE_DISABLE=disable)
    assert done.stdout.strip() == found, done.stderr


@pytest.mark.parametrize("on", [True, False])
def test_deterministic_algorithms_are_the_trainers(on: bool) -> None:
    torch.use_deterministic_algorithms(on)
    try:
        assert observe(CONTRACT, HOST).settings["deterministic algorithms"] == ("on" if on else "off")
        assert "deterministic algorithms" not in observe(CONTRACT).settings
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("folder", "found"), [("normalization", "NVIDIA's"), ("lib", "the index's apex, a web toolkit"), (None, "absent")]
)
def test_the_two_packages_of_one_name(
    folder: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if folder is not None:
        (tmp_path / "apex" / folder).mkdir(parents=True)
        (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')")
        monkeypatch.syspath_prepend(tmp_path)
    assert LOOKS["Apex"]() == found


def test_the_norm_that_megatron_took() -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    norm = gpt_layer_specs.LNImpl
    assert LOOKS["norm of the local spec"]() == f"{norm.__name__} of {norm.__module__.partition('.')[0]}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_an_accelerator_it_says_what_it_could_not_look_at() -> None:
    seen = observe(CONTRACT, HOST)
    for name in ("device", "NCCL", KERNELS, PRODUCTS, "TF32"):
        assert name not in seen.settings and seen.why(name) == "no CUDA device"
    unsized = gpu_contract(CONTRACT.family.name, "megatron")
    assert observe(unsized).why(PRODUCTS) == "the contract knows no sizes"


def test_what_a_flag_or_a_variable_says_is_not_called_observed() -> None:
    seen = observe(CONTRACT, HOST)
    for name in ("NCCL_ALGO", "temperature", "log-probs come from", "log-softmax", "tensor parallel"):
        assert seen.how(name) == "configured", name
    for name in ("torch", "torch.compile", "Apex", "deterministic algorithms"):
        assert seen.how(name) == "observed", name
    assert seen.how("no such row") == ""


def test_ranks_are_those_of_megatrons_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    assert observe(CONTRACT, HOST).how("tensor parallel") == "configured"
    for name, value in {"model_parallel_is_initialized": True, "get_tensor_model_parallel_world_size": 4,
                        "get_context_parallel_world_size": 1}.items():  # fmt: skip
        monkeypatch.setattr(parallel_state, name, lambda value=value: value)
    seen = observe(CONTRACT, HOST)
    assert [seen.settings[name] for name in ("tensor parallel", "context parallel")] == ["4", "1"]
    assert seen.how("tensor parallel") == "observed"


def as_miles(cast: torch.dtype, widens: bool = False) -> dict[str, Any]:
    """Miles's logit_processors as far as it is called; `widens`: it hands log-probs on in fp32."""

    def get_responses(logits, *, args, unconcat_tokens, total_lengths, response_lengths, max_seq_lens):
        (tokens,), (total,), (response,) = unconcat_tokens, total_lengths, response_lengths
        assert len(tokens) == total == response + 1 == 8 == max_seq_lens[0]
        assert logits.shape == (1, total // 2, 8)
        yield logits[0, : total // 2].to(cast), tokens[: total // 2]

    def calculate(logits, tokens, group, *, true_on_policy):
        assert group is None and true_on_policy
        log_probs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return log_probs.float() if widens else log_probs, None

    return {"get_responses": get_responses, "calculate_log_probs_and_entropy": calculate}


def load_miles(log_probs: str, functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    state = Namespace(cp=Namespace(size=2))
    parallel = NEEDS.parallel.addresses[0].module
    stand_ins.load({log_probs: functions, parallel: {"get_parallel_state": lambda: state}}, monkeypatch)


LOG_PROBS = [address.module for address in NEEDS.responses.addresses]


@pytest.mark.parametrize("log_probs", LOG_PROBS)
@pytest.mark.parametrize(
    ("miles", "found"),
    [
        (as_miles(torch.bfloat16), "bf16"),
        (as_miles(torch.float32), "fp32"),
        (as_miles(torch.bfloat16, widens=True), "bf16 and fp32"),
    ],
)
def test_the_dtype_of_the_log_softmax_is_that_of_the_hosts_own_functions(
    miles: dict[str, Any], found: str, log_probs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_miles(log_probs, miles, monkeypatch)
    seen = observe(CONTRACT, HOST)
    assert (seen.settings["log-softmax"], seen.how("log-softmax")) == (found, "observed")
    stated = observe(CONTRACT, Namespace(true_on_policy_mode=False))
    assert (stated.settings["log-softmax"], stated.how("log-softmax")) == ("fp32", "configured")


def test_another_release_of_the_host_stops_no_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    load_miles(LOG_PROBS[0], {}, monkeypatch)
    seen = observe(CONTRACT, HOST)
    assert (seen.settings["log-softmax"], seen.how("log-softmax")) == ("bf16", "configured")


def test_kernels_that_are_not_those_of_the_contract_are_told() -> None:
    def failures() -> Iterator[Failure]:
        raise PinError("linear falls back to Triton")
        yield

    assert first_failure(failures(), "batch-invariant") == "linear falls back to Triton"
    mismatch = first_mismatch(torch.zeros(2), torch.ones(2))
    assert mismatch is not None
    failure = Failure("linear", (2, 3), "a row alone", mismatch)
    assert first_failure(iter([failure]), "batch-invariant") == str(failure)
    assert first_failure(iter([]), "batch-invariant") == "batch-invariant"


def test_a_look_that_fails_leaves_its_own_row_unseen_and_no_other():
    def absent() -> str:
        raise NotSeenError("not seen: no CUDA device")

    looks = {"broken": lambda: str(1 / 0), "absent": absent, "seen": lambda: "on"}
    unseen = {"broken": "ZeroDivisionError: division by zero", "absent": "no CUDA device"}
    assert looked(looks) == ({"seen": "on"}, unseen)


# Kernels of Transformer Engine and Apex: a row says whether one is asked for, and whether it could run.

ROPE = next(fused for fused in FUSED if fused.host == "apply_rope_fusion")


class AttnBackend(enum.Enum):
    """The values into which Megatron parses --attention-backend."""

    flash = 1
    fused = 2
    auto = 5


ASKED = {"transformer_impl": "transformer_engine", "attention_backend": AttnBackend.auto}


def asked(fused: Setting) -> Namespace:
    return Namespace(**{fused.host: ASKED.get(fused.host, True)})


@pytest.mark.parametrize("fused", FUSED, ids=lambda fused: fused.host)
def test_a_kernel_is_on_where_it_is_asked_for_and_its_library_is_there(
    fused: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = f"off, no {fused.module}"
    assert fused_of_host(asked(fused)) == {fused.name: absent}
    monkeypatch.setattr("true_on_policy.observe.process.findable", lambda module: module == fused.module)
    assert fused_of_host(asked(fused)) == {fused.name: f"asked for, {fused.module} not imported"}
    monkeypatch.setitem(sys.modules, fused.module, ModuleType(fused.module))
    assert fused_of_host(asked(fused)) == {fused.name: "on"}
    assert fused_of_host(Namespace(**{fused.host: fused.off[0]})) == {fused.name: "off"}


def test_every_remedy_is_a_flag_of_the_launch() -> None:
    words = [" ".join(flag.words) for flag in launch_flags(CONTRACT)]
    assert all(fused.remedy in words for fused in FUSED if fused.remedy)


def test_what_megatron_chose_is_seen_once_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core.optimizer  # noqa: F401
    from megatron.core.transformer import transformer_block

    assert chosen("megatron.core.optimizer", "Adam") == "AdamW of torch"
    assert chosen(transformer_block.__name__, "LayerNormImpl") == "WrappedTorchNorm of megatron"
    assert chosen("megatron.core.fusions.fused_layer_norm", "HAVE_FUSED_LAYER_NORM") == "absent"
    monkeypatch.setattr("megatron.core.fusions.fused_layer_norm.HAVE_FUSED_LAYER_NORM", True)
    assert chosen("megatron.core.fusions.fused_layer_norm", "HAVE_FUSED_LAYER_NORM") == "found"
    assert chosen("no.such.module", "x") == "not imported"


def test_flags_are_configured_and_choices_observed() -> None:
    seen = observe(CONTRACT, Namespace(apply_rope_fusion=False, true_on_policy_mode=False))
    assert seen.settings[ROPE.name] == "off" and seen.how(ROPE.name) == "configured"
    assert all(seen.how(row) == "observed" for row in CHOSEN)
