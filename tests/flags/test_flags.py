"""Flags of a launch: one table prints them and checks them in the trainer; releases that lack one are named."""

import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from commands import ProofCommand
from launchers import accepted

from mis_plugins.hosts.arguments import kinds, recorded
from true_on_policy.contract.gpu import (
    CHOICES,
    MODELS,
    GpuContract,
    Size,
    check_environment,
    family_and_size,
    gpu_contract,
    model_contract,
)
from true_on_policy.contract.model_config import checkpoint_family
from true_on_policy.errors import ContractError
from true_on_policy.flags import rules as releases
from true_on_policy.flags.command import REFUSALS, check_host, groups, launch_flags
from true_on_policy.flags.rules import FILES, RELEASES, check_installed, declares, releases_with
from true_on_policy.observe.dumps import Dump, Process, load, write
from true_on_policy.observe.process import Observation

CONTRACTS = {
    "megatron": model_contract("qwen3-4B", "megatron", trainer_tp=2, engine_tp=8, context_parallel=4),
    "fsdp": model_contract("qwen3-4B", "fsdp"),
}


Printed = Callable[..., list[str]]


@pytest.fixture
def printed(proof_command: ProofCommand) -> Printed:
    """printed(*words): the lines of a launch for Miles."""
    return lambda *words: proof_command("flags", "--miles", *words).out.splitlines()


@pytest.mark.parametrize("backend", CONTRACTS)
def test_every_flag_is_one_of_its_owner_and_in_a_release(backend: str) -> None:
    files = {"fsdp": "miles-fsdp"}
    for flag in launch_flags(CONTRACTS[backend]):
        assert flag.words[0] in accepted(files.get(flag.owner, flag.owner)), flag
        assert releases_with(flag.owner, flag.name)


def test_what_a_release_lacks_is_a_flag_that_is_launched() -> None:
    names = {flag.name for contract in CONTRACTS.values() for flag in launch_flags(contract)}
    assert {flag for release in RELEASES for flag in release.lacks} <= names
    assert {release.owner for release in RELEASES} == set(FILES)


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        ((), (8, 1, 8)),
        (("--cp", "4"), (2, 4, 8)),
        (("--cp", "2"), (4, 2, 8)),
        (("--tp", "2", "--cp", "4"), (2, 4, 8)),
        (("--tp", "8", "--cp", "2"), (8, 2, 16)),
        (("--model", "qwen3-0.6B", "--engine-tp", "2"), (8, 1, 2)),
    ],
)
def test_what_a_user_leaves_out_of_a_layout_is_chosen_so_that_it_holds(
    words: tuple[str, ...], layout: tuple[int, int, int], printed: Printed
) -> None:
    lines = printed(*words)
    names = ("--tensor-model-parallel-size", "--context-parallel-size", "--rollout-num-gpus-per-engine")
    assert tuple(int(lines[lines.index(name) + 1]) for name in names) == layout


@pytest.mark.parametrize("words", [("--cp", "4", "--tp", "8", "--engine-tp", "8"), ("--cp", "2", "--tp", "1"),
                                   ("--model", "qwen3-0.6B", "--cp", "2"), ("--tp", "2")])  # fmt: skip
def test_what_a_refused_layout_is_told_to_set_holds(
    words: tuple[str, ...], proof_command: ProofCommand, printed: Printed
) -> None:
    """Beside the user's own context parallelism, or without any."""
    told = proof_command("flags", "--miles", *words, code=2).err.rpartition(";")[2]
    advised = dict(re.findall(r"(--cp|--tp|--engine-tp) (\d+)", told))
    both = re.findall(r"both to (\d+)", told)
    assert ("--cp" in words) == ("--cp" in advised), "the user's own is kept or taken back"
    context = advised.get("--cp", "1")
    tensor, engine = (advised.get(name, *both) for name in ("--tp", "--engine-tp"))
    model = words[: 2 * ("--model" in words)]
    assert printed(*model, "--cp", context, "--tp", tensor, "--engine-tp", engine)
    assert context == dict(zip(words[::2], words[1::2], strict=True)).get("--cp", "1") or context == "1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "qwen3-9B", "--backend", "fsdp"), "--model: got 'qwen3-9B'"),
        (("--model", "llama3.1-8B", "--backend", "fsdp"), "llama cannot be launched: Miles v0.1.0 knows one"),
        (("--model", "qwen3-4B", "--backend", "megatron", "--tp", "1"), "two orders"),
        (("--model", "qwen3-4B", "--backend", "fsdp", "--tp", "2"), "data parallel alone"),
        (("--model", ""), "--model: got ''; choose one of"),
        (("--tp", "0"), "--tp: got 0; a side has 1 rank or more"),
        (("--engine-tp", "0"), "--engine-tp: got 0"),
        (("--cp", "0"), "--cp: got 0"),
        (("--tp", "3"), "--tp 3: the tree of partial sums needs a power of two"),
    ],
)
def test_what_cannot_be_launched_is_exit_2(words: tuple, message: str, proof_command: ProofCommand) -> None:
    read = proof_command("flags", "--miles", *words, code=2)
    assert message in read.err and read.out == ""


def test_slime_is_told_what_it_lacks(proof_command: ProofCommand) -> None:
    told = proof_command("flags", "--slime", "--model", "qwen3-4B", "--backend", "megatron", code=2).err
    assert "--slime: slime v0.3.1 has no --true-on-policy-mode, --recompute-logprobs-via-prefill" in told


def test_a_host_has_to_be_named(proof_command: ProofCommand) -> None:
    told = proof_command("flags", "--model", "qwen3-4B", "--backend", "megatron", code=2).err
    assert "one of the arguments --miles --slime is required" in told


def test_sources_declare_a_flag_by_name_or_as_a_field() -> None:
    assert declares('parser.add_argument(\n    "--train-backend",', "--train-backend")
    assert declares("group.add_argument('--no-rope-fusion', action=", "--no-rope-fusion")
    assert declares("class C:\n    batch_invariant_mode: bool = False", "--batch-invariant-mode")
    assert not declares("# --batch-invariant-mode is gone\n    batch_invariant_mode_of: int", "--batch-invariant-mode")
    assert not declares('"--train-backends"', "--train-backend")
    assert not declares("batch_invariant_mode: bool", "--batch-invariant-mode")  # not in a class


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The declarations of an SGLang without the contract, importable as its package."""
    fields = tmp_path / "sglang" / "srt" / "arg_groups" / "fields"
    fields.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text("class ServerArgs:\n    tp_size: int = 1\n")
    (fields / "exec_.py").write_text(
        "class Exec:\n    enable_deterministic_inference: A[bool, 'x'] = False\n    attention_backend: A[str, 'x']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "sglang"


def test_an_installed_engine_without_a_flag_is_named(sglang: Path, proof_command: ProofCommand) -> None:
    read = proof_command("flags", "--miles", "--model", "qwen3-4B", "--backend", "fsdp", code=2)
    assert read.out == "" and "sglang (a checkout) has no --true-on-policy-contract" in read.err
    assert "branch sglang-miles (98f6dd71)" in read.err and "PyPI" not in read.err


def test_an_installed_engine_with_the_flags_passes(sglang: Path) -> None:
    exec_ = sglang / "srt" / "arg_groups" / "fields" / "exec_.py"
    exec_.write_text(exec_.read_text() + "    true_on_policy_contract: A[str, 'x'] = None\n")
    names = [flag.name for flag in launch_flags(CONTRACTS["fsdp"]) if flag.owner == "sglang"]
    assert check_installed("sglang", names)
    with pytest.raises(ContractError, match="has no --no-such-flag; seen in "):
        check_installed("sglang", ["--no-such-flag"])


def test_a_core_without_a_trainer_is_not_installed() -> None:
    """The wheel megatron-core, which this project's tests use, holds no megatron/training."""
    assert releases.installed("megatron") is None
    assert not check_installed("megatron", ["--true-on-policy-contract"])


def config(folder: Path, architecture: str = "Qwen3ForCausalLM", size: Size = MODELS["qwen3-4B"][1], **changes) -> Path:
    stated = {"architectures": [architecture], **{name: getattr(size, name) for name in size.__dataclass_fields__}}
    (folder / "config.json").write_text(json.dumps(stated | changes))
    return folder


def host_args(backend: str, checkpoint: Path, **changes) -> Namespace:
    """What Miles's parser gives for our flags, beside its own defaults."""
    defaults = {"rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "train_backend": backend}
    asked = {flag.attribute: flag.value for flag in launch_flags(CONTRACTS[backend])}
    return Namespace(**defaults | asked | {"hf_checkpoint": str(checkpoint)} | changes)


@pytest.mark.parametrize("backend", CONTRACTS)
def test_a_flag_that_was_not_parsed_is_named(backend: str, tmp_path: Path) -> None:
    """Each in turn, but for those that make another contract or none."""
    layout = {"sglang_attention_backend", "tensor_model_parallel_size", "context_parallel_size", "train_backend"}
    layout |= {"rollout_num_gpus_per_engine", "cp_comm_type"}
    for flag in launch_flags(CONTRACTS[backend]):
        if flag.attribute in layout:
            continue
        other = "other" if isinstance(flag.value, str) else not flag.value
        with pytest.raises(ContractError, match=f"{flag.attribute} is {other!r}; launch with {flag.words[0]}"):
            check_host(host_args(backend, config(tmp_path), **{flag.attribute: other}))


@pytest.mark.parametrize("rule", REFUSALS, ids=lambda rule: rule.attribute)
def test_a_setting_that_breaks_it_is_refused(rule, tmp_path: Path) -> None:
    args = host_args("fsdp", config(tmp_path), **{rule.attribute: "something else"})
    with pytest.raises(ContractError, match=f"{rule.attribute} is 'something else': "):
        check_host(args)


def test_a_layout_is_refused_in_the_flags_of_miles(tmp_path: Path) -> None:
    layout = {"tensor_model_parallel_size": 2, "rollout_num_gpus_per_engine": 1}
    quoted = (
        "^--tensor-model-parallel-size 2 x --context-parallel-size 4, --rollout-num-gpus-per-engine 1: the .* orders"
    )
    with pytest.raises(ContractError, match=quoted):
        check_host(host_args("megatron", config(tmp_path), **layout))


@pytest.mark.parametrize(("value", "gemm"), [("0", "triton_persistent"), ("1", "deep_gemm")])
def test_the_environment_tells_the_engines_product(value: str, gemm: str, tmp_path: Path) -> None:
    args = host_args("megatron", config(tmp_path))
    contract = check_host(args, {"SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": value})
    default = check_host(args, {})
    assert isinstance(contract, GpuContract)
    assert isinstance(default, GpuContract)
    assert (contract.engine_gemm, contract.trainer_gemm) == (gemm, "triton_persistent")
    assert default.engine_gemm == "triton_persistent"


# Settings of the hosts with which every word of the launch is parsed, and the contract holds all the same nowhere.
WITHOUT_A_WORD = {
    "megatron_to_hf_mode": "bridge",
    "spec": ["my.module", "spec"],
    "custom_model_provider_path": "my.module.provider",
    "sglang_prefill_attention_backend": "flashinfer",
    "sglang_decode_attention_backend": "triton",
    "sglang_torchao_config": "int8wo",
    "sglang_dtype": "float32",
    "sglang_model_impl": "transformers",
    "sglang_json_model_override_args": '{"rope_scaling": {"type": "linear"}}',
    "sglang_enable_tf32_matmul": True,
    "sglang_enable_lora": True,
    "sglang_lora_paths": ["a"],
    "sglang_enable_mixed_chunk": True,
    "sglang_preferred_sampling_params": '{"repetition_penalty": 1.1}',
    "sglang_enable_watermark": True,
    "sglang_enable_fp32_lm_head": True,
    "sglang_enable_dp_attention": True,
    "sglang_attn_dp_size": 2,
    "sglang_attn_cp_size": 2,
    "sglang_dcp_size": 2,
    "sglang_enable_layernorm_sp": True,
    "sglang_enable_nvidia_megakernel": True,
    "sglang_bf16_gemm_backend": "gemv",
    "sglang_enable_torch_compile": True,
    "sglang_modelopt_quant": "fp8",
    "sglang_rl_quant_profile": "profile",
    "lora_adapter_path": "adapter",
    "sglang_enable_quant_communications": True,
}


def test_a_refused_name_is_one_that_a_host_parses() -> None:
    """A misspelled name would refuse nothing. One name is of SGLang before 0.5.23."""
    names = {name for host in recorded().values() for name in kinds(host)}
    assert {rule.attribute for rule in REFUSALS} - names == {"sglang_torchao_config"}


@pytest.mark.parametrize("name", WITHOUT_A_WORD)
def test_a_setting_that_undoes_a_launch_is_refused_and_said_how_to_drop(name: str, tmp_path: Path) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ContractError, match=f"{name} is .*{flag}"):
        check_host(host_args("megatron", config(tmp_path), **{name: WITHOUT_A_WORD[name]}))


@pytest.mark.parametrize("external", [True, False])
def test_engines_that_somebody_else_starts_are_told_not_to_be_checked(
    external: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_host(host_args("megatron", config(tmp_path), rollout_external=external))
    assert ("--rollout-external: Miles starts no engine" in caplog.text) == external


GROUPS = """
sglang:
  - name: actor
    server_groups:
      - {{worker_type: placeholder, num_gpus: 1, overrides: {{attention_backend: triton}}}}
      - {{worker_type: regular, num_gpus: 8}}
      - {{worker_type: regular, num_gpus: 8, {changed}}}
  - {{name: rm, model_path: /elsewhere, num_gpus_per_engine: 1, server_groups: [{{worker_type: regular, num_gpus: 1}}]}}
  - {{name: eval, num_gpus_per_engine: 1, server_groups: [{{worker_type: regular, num_gpus: 1}}]}}
"""


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ("num_gpus_per_engine: 4", "rollout_num_gpus_per_engine is 4; launch with --rollout-num-gpus-per-engine 8"),
        ("overrides: {tp_size: 2}", "rollout_num_gpus_per_engine is 2; launch with"),
        ("overrides: {attention_backend: triton}", "sglang_attention_backend is 'triton'; launch with"),
        ("overrides: {enable_mixed_chunk: true}", "sglang_enable_mixed_chunk is True: "),
        ("overrides: {dtype: half}", "sglang_dtype is 'half': "),
        ("overrides: {enable_deterministic_inference: false}", "sglang_enable_deterministic_inference is False; "),
    ],
)
def test_what_a_group_of_engines_overrides_is_checked_too(changed: str, fault: str, tmp_path: Path) -> None:
    """Those of the trained model alone."""
    file = tmp_path / "groups.yaml"
    file.write_text(GROUPS.format(changed=changed))
    with pytest.raises(ContractError) as raised:
        check_host(host_args("megatron", config(tmp_path), sglang_config=str(file)))
    (told,) = str(raised.value).splitlines()[1:]
    assert told.startswith(f"  {file}, model 'actor', group 2: {fault}")


@pytest.mark.parametrize(("path", "trained"), [("/elsewhere", False), ("{checkpoint}", True)])
def test_the_path_that_a_group_overrides_decides_whether_its_model_is_trained(
    path: str, trained: bool, tmp_path: Path
) -> None:
    """A group's own model_path decides whether it is trained, as in Miles's ModelConfig.resolve."""
    file, model = tmp_path / "groups.yaml", config(tmp_path)
    overrides = {"dtype": "half", "model_path": path.format(checkpoint=model)}
    group = {"worker_type": "regular", "num_gpus": 8, "overrides": overrides}
    own = {} if path == "/elsewhere" else {"model_path": "/elsewhere"}
    file.write_text(json.dumps({"sglang": [{"name": "actor", "server_groups": [group], **own}]}))
    assert len([*groups(host_args("megatron", model, sglang_config=str(file)))]) == trained


def test_a_fault_of_all_engines_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(GROUPS.format(changed="overrides: {}"))
    args = host_args("megatron", config(tmp_path), sglang_config=str(file), sglang_enable_mixed_chunk=True)
    with pytest.raises(ContractError) as raised:
        check_host(args)
    assert str(raised.value).count("sglang_enable_mixed_chunk") == 1


@pytest.mark.parametrize("text", [GROUPS.format(changed="overrides: {}"), "", "[]", "sglang: 3", ":\n-", None])
def test_groups_that_change_nothing_or_cannot_be_read_stop_nothing(
    text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "groups.yaml"
    if text is not None:
        file.write_text(text)
    args = host_args("megatron", config(tmp_path), sglang_config=str(file))
    assert check_host(args) == CONTRACTS["megatron"]
    assert ("the groups are not checked" in caplog.text) == (text is None or "actor" not in text)


def test_every_fault_is_a_line(tmp_path: Path) -> None:
    args = host_args("fsdp", config(tmp_path), rollout_temperature=0.7, deterministic_mode=False)
    with pytest.raises(ContractError) as raised:
        check_host(args)
    named = [line.split(" is ")[0].strip() for line in str(raised.value).splitlines()[1:]]
    assert named == ["rollout_temperature", "deterministic_mode"]


def test_a_host_without_a_flag_is_told_which_release_has_it(tmp_path: Path) -> None:
    args = host_args("fsdp", config(tmp_path))
    delattr(args, "sglang_true_on_policy_contract")
    with pytest.raises(ContractError, match="the host has no --sglang-true-on-policy-contract; seen in sgl-project"):
        check_host(args)


def test_megatron_spells_some_values_in_its_own_way(tmp_path: Path) -> None:
    args = host_args("megatron", config(tmp_path), cp_comm_type=["a2a"], attention_backend=Namespace(name="flash"))
    assert check_host(args) == CONTRACTS["megatron"]


@pytest.mark.parametrize("kind", [["p2p"], "all_gather", ["a2a", "p2p"], None])
def test_ring_context_parallel_is_refused(kind, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="cp_comm_type: got .*--cp-comm-type a2a"):
        check_host(host_args("megatron", config(tmp_path), cp_comm_type=kind))


def test_families_are_read_from_a_checkpoint(tmp_path: Path) -> None:
    family, size = checkpoint_family(config(tmp_path) / "config.json")
    assert (family.name, size) == ("qwen3-dense", MODELS["qwen3-4B"][1])
    _, bare = checkpoint_family(config(tmp_path, "LlamaForCausalLM", head_dim=None) / "config.json")
    assert bare.head_dim == 2560 // 32
    nested = {"text_config": dict(size.__dict__), "hidden_size": 1}
    vision, text = checkpoint_family(config(tmp_path, "Qwen3VLForConditionalGeneration", **nested) / "config.json")
    assert (vision.name, text) == ("qwen3-vl-dense", size)


def test_models_that_are_not_covered_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="Qwen3MoeForCausalLM is not covered; MoE: no row for the router"):
        check_host(host_args("fsdp", config(tmp_path, "Qwen3MoeForCausalLM")))
    with pytest.raises(ContractError, match="GPT2LMHeadModel is not covered; covered are Qwen3ForCausalLM, "):
        check_host(host_args("fsdp", config(tmp_path, "GPT2LMHeadModel")))
    with pytest.raises(ContractError, match="llama cannot be launched"):
        check_host(host_args("fsdp", config(tmp_path, "LlamaForCausalLM")))
    assert gpu_contract("llama", "fsdp").family.missing


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (None, r"--hf-checkpoint: .*config.json is no model's config that can be read .* takes a folder of this"),
        ("{", "--hf-checkpoint: .* is no model's config that can be read"),
        ("[]", "--hf-checkpoint: .* is no model's config"),
        ('{"architectures": null}', "no architecture is not covered; covered are"),
        ('{"architectures": ["Qwen3ForCausalLM"]}', "config.json: states no num_attention_heads"),
        (
            '{"architectures": ["Qwen3ForCausalLM"], "rope_scaling": {"type": "linear"}}',
            "rope of type 'linear' is not covered: the row of rope is the plain",
        ),
        ('{"architectures": "Qwen3ForCausalLM"}', "architectures: got 'Qwen3ForCausalLM'; expected a list of names"),
        ('{"architectures": [{}]}', r"architectures: got \[{}\]; expected a list of names"),
        (
            '{"architectures": ["Qwen3ForCausalLM"], "rope_scaling": "linear"}',
            "rope_scaling: got 'linear'; expected a map",
        ),
        ('{"text_config": "x"}', "text_config: got 'x'; expected a mapping"),
        ('{"text_config": {"rope_parameters": [1]}}', r"rope_parameters: got \[1\]; expected a mapping"),
        ('{"num_attention_heads": 0}', "num_attention_heads: got 0; expected a whole number from 1 on"),
        ('{"intermediate_size": [1]}', r"intermediate_size: got \[1\]; expected a whole number"),
        (
            '{"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": null}',
            "config.json: states no num_attention_heads",
        ),
        ('{"a":' * 100_000, "maximum recursion depth exceeded"),
    ],
)
def test_a_checkpoint_that_states_nothing_is_told(stated: str | None, message: str, tmp_path: Path) -> None:
    """A name on a hub is no folder: Miles would download it, and nothing of it is here to be read."""
    if stated is not None:
        (tmp_path / "config.json").write_text(stated)
    with pytest.raises(ContractError, match=message):
        checkpoint_family(tmp_path / "config.json")


# Where a parser of the hosts puts a word whose name does not tell: Megatron's arguments.py.
ELSEWHERE = {"--no-rope-fusion": ("apply_rope_fusion", False)}


def as_parsed(words: list[str]) -> dict[str, Any]:
    """As argparse of the hosts does; independent of what the table of flags says of attributes."""
    found: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--no-"):
            found |= dict([ELSEWHERE.get(word, (word[5:].replace("-", "_"), False))])
        elif word.startswith("--"):
            value = True if following.startswith("--") else int(following) if following.isdecimal() else following
            found[word[2:].replace("-", "_")] = value
    return found


def launchable() -> Iterator[tuple[str, list[str], GpuContract]]:
    """Every contract that holds: its model, the words that ask for it, and itself."""
    ranks, sharing = (1, 2, 4, 8, 16), (1, 2, 4, 8)
    for model, backend, tp, cp, engine, gemm in product(
        MODELS, CHOICES["backend"], ranks, sharing, ranks, CHOICES["engine_gemm"]
    ):
        layout = {"trainer_tp": tp, "context_parallel": cp, "engine_tp": engine, "engine_gemm": gemm}
        try:
            contract = model_contract(model, backend, **layout)
            launch_flags(contract)
        except ContractError:
            continue
        words = ["--model", model, "--backend", backend, "--tp", f"{tp}", "--cp", f"{cp}"]
        yield model, [*words, "--engine-tp", f"{engine}", "--gemm", gemm], contract


def test_what_flags_print_is_what_the_trainer_finds(tmp_path: Path, printed: Printed) -> None:
    """Arguments, environment and the trainer's file give the contract back, at each layout that holds."""
    seen = []
    for model, words, contract in launchable():
        args = Namespace(**as_parsed(printed(*words)))
        environment = dict(line.split("=", 1) for line in printed(*words, "--env"))
        args.hf_checkpoint = str(config(tmp_path, size=MODELS[model][1]))
        args.__dict__ = {"train_backend": "megatron"} | vars(args)
        check_environment(contract, environment)
        assert check_host(args, environment) == contract, words
        written = write(tmp_path / "trainer.json", Dump(Process(), Observation({}, {}), contract))
        assert load(written)[0] == contract
        seen.append((contract.backend, contract.trainer_tp, contract.context_parallel, contract.engine_tp))
    assert {("fsdp", 1, 1, 1), ("megatron", 8, 1, 8), ("megatron", 2, 4, 8), ("megatron", 4, 2, 8)} <= set(seen)


def test_names_of_hugging_face_are_those_of_their_models() -> None:
    assert family_and_size("meta-llama/Llama-3.1-8B") == MODELS["llama3.1-8B"]
    assert family_and_size("Qwen/Qwen2.5-3B") == MODELS["qwen2.5-3B"]
    with pytest.raises(ContractError, match="--model: got 'Qwen/Qwen3-4B-Nothing'; choose one of qwen3-0.6B"):
        family_and_size("Qwen/Qwen3-4B-Nothing")
    with pytest.raises(ContractError, match="is not covered: MoE"):
        family_and_size("Qwen/Qwen3-30B-A3B")
