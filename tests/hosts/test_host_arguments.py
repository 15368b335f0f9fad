"""What a config file sets beside `mis:`, compared with the arguments that the hosts' own parsers have."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ConfigCommand, ran

from mis_plugins.__main__ import main
from mis_plugins.hosts import registry
from mis_plugins.hosts.arguments import flags, kinds, recorded, surprises

ROOT = Path(__file__).parents[2]
HOSTS = tuple(recorded())
every_host = pytest.mark.parametrize("host", HOSTS)


ALL = [(), *(("--host", host) for host in HOSTS)]
ON_SGLANG = [(), *(("--host", host) for host in HOSTS if "sglang" in registry.every_host()[host].records)]
# A key, the warning of it, and the options of the commands that warn so.
KEYS: list[tuple[str, str | None, list[tuple[str, ...]]]] = [
    *((text, said, ALL) for text, said in (
        ("global_batch_size: '64'", "which the host keeps, and it expects a number; write 64\n"),
        ("lr: 1e-6", "lr: YAML reads '1e-6' as text, which the host keeps, and it expects a number; write 1.0e-06"),
        ("lr: fast", "lr: got 'fast'; the host expects a number"),
        ("lr: inf", "lr: got 'inf'; the host expects a number"),
        ("global_batch_size: true", "global_batch_size: got True; the host expects a number"),
        ("use_kl_loss: 'false'", "use_kl_loss: got 'false'; the host expects true or false"),
        ("loss_type: on", "loss_type: YAML reads True, and the host expects text; put it in quotes"),
        ("use_kl_los: true", "(did you mean use_kl_loss?)"),
        ("zzzzzz: 1", "; only a function of your own would read it"),
        ("lr: 1.0e-6", None),
        ("lr: null", None),
        ("use_kl_loss: true", None),
        ("kl_loss_coef: 0", None),
        ("advantage_estimator: grpo", None),
    )),
    ("sglang_mem_fraction_static: 7e-1", "sglang_mem_fraction_static: YAML reads '7e-1' as text", ON_SGLANG),
    ("router_selector: [a=b]", None, ON_SGLANG),
    ("vllm_gpu_memory_utilization: 7e-1", "utilization: YAML reads '7e-1' as text", [(), ("--host", "vime")]),
    ("sglang_attention_backend: x", "sglang_attention_backend: no argument of vime", [("--host", "vime")]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said", "options"), [(text, said, one) for text, said, options in KEYS for one in options]
)
def test_keys_beside_ours(text: str, said: str | None, options: tuple[str, ...], config_command: ConfigCommand):
    told = config_command(f"{text}\nmis: {{weight: {{upper: 3}}}}\n", *options).out
    warnings = [line for line in told.splitlines(keepends=True) if line.startswith("warning: ")]
    assert len(warnings) == (said is not None) and (said or "") in "".join(warnings)


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("mask_high_ratios", ()),
        ("true_on_policy_mode", ("miles", "fsdp", "torchtitan")),
        ("warmup_ratio", ("fsdp", "torchtitan")),
        ("titan_model_name", ("torchtitan",)),
        ("swiglu", ("miles", "slime", "vime")),
        ("custom_advantage_function_path", ("slime", "vime")),
        ("vllm_gpu_memory_utilization", ("vime",)),
        ("eval_sglang_mem_fraction_static", ("miles", "fsdp", "torchtitan")),
        ("debug_train_only", HOSTS),
        ("router_policy", HOSTS),
    ],
)
def test_who_knows_a_key(key: str, known: tuple[str, ...]):
    """A key passes in silence where at least one of several hosts knows it."""
    assert tuple(host for host in HOSTS if key in kinds(registry.every_host()[host])) == known
    assert [host for host in HOSTS if not list(surprises({key: None}, registry.every_host()[host]))] == list(known)
    assert bool(list(surprises({key: None}, None))) == (not known)


@every_host
def test_the_comparison_s_key_is_no_surprise(host: str):
    assert not list(surprises({"bitwise": {"on_difference": "raise"}}, registry.every_host()[host]))


@every_host
def test_what_number_text_means_is_what_is_proposed(host: str):
    for text in ("1e-6", "1E5", "2.5e10", "1e22", "-3e-4", "7"):
        (warning,) = surprises({"lr": text}, registry.every_host()[host])
        proposed = yaml.safe_load(warning.rpartition("write ")[2])
        assert type(proposed) is (int if text.isdecimal() else float) and proposed == float(text)


@every_host
def test_records_are_whole(host: str):
    """Arguments of every part of a host are there, with the kind that its parser says."""
    expected = {"use_tis": "switch", "eps_clip": "number", "custom_config_path": "text", "lr": "number",
                "weight_decay": "number", "train_backend": "text"}  # fmt: skip
    engine, backend = ("vllm", "other") if host == "vime" else ("sglang", "text")
    expected |= {f"{engine}_server_concurrency": "number", f"{engine}_attention_backend": backend}
    if registry.every_host()[host].package == "miles":
        expected["opd_teacher_urls"] = "other"
    assert {name: kinds(registry.every_host()[host])[name] for name in expected} == expected
    assert len(kinds(registry.every_host()[host])) > 1000
    assert {"--use-tis", "--custom-config-path"} <= flags("slime") & flags("miles")


@pytest.mark.parametrize("record", sorted({record for host in recorded().values() for record in host.records}))
def test_records_name_what_they_were_made_from(record: str):
    first, *lines = (ROOT / "mis_plugins" / "hosts" / "records" / f"{record}.txt").read_text().splitlines()
    if record in ("vime", "miles-torchtitan"):
        assert re.match(r"# Arguments of .*, .*\.py at [0-9a-f]{9} and", first) and " read: " in lines.pop(0)
    else:
        assert f"lab.host_arguments {record} CHECKOUT`; CHECKOUT at " in first
    assert lines == sorted(lines) and {line.split()[1] for line in lines} <= {"switch", "number", "text", "other"}


@pytest.mark.parametrize(
    ("host", "hook"),
    [
        ("miles", "mis_plugins.mis.compute_mis_weights_with_cp"),
        ("slime", "mis_plugins.mis.compute_mis_weights_with_cp"),
        ("fsdp", "mis_plugins.mis.compute_mis_weights_fsdp"),
        ("torchtitan", "mis_plugins.mis.compute_mis_weights_with_cp"),
        ("vime", "mis_plugins.mis.compute_mis_weights_with_cp"),
    ],
)
def test_flags_are_ready_to_paste(
    host: str, hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """From another folder too: the path is whole, and quoted for the shell."""
    monkeypatch.chdir(tmp_path)
    Path("my config.yaml").write_text("mis: {weight: {}, metrics: all}")
    assert main(["config", "check", "my config.yaml", "--host", host]) == 0
    (needs,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("needs: ")]
    split = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {needs.removeprefix('needs: ')}"], capture_output=True, text=True
    )
    words = split.stdout.splitlines()
    assert words[:3] == ["--use-tis", "--custom-tis-function-path", hook]
    assert words[-2:] == ["--custom-config-path", str(tmp_path / "my config.yaml")]
    assert ("mis_plugins.mis.report_step" in words) == registry.every_host()[host].step_hook
    parsers = registry.every_host()[host].records
    assert {word for word in words if word.startswith("--")} <= {flag for name in parsers for flag in flags(name)}


def test_a_pipe_has_no_path():
    words = ("-m", "mis_plugins", "config", "check", "/dev/stdin", "--host", "slime")
    done = ran(*words, given="mis: {weight: {upper: 3}}")
    assert done.returncode == 0 and "--custom-config-path FILE\n" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("mis", "refused", "said"),
    [
        ({"weight": {"normalize": {"scope": "rollout"}}}, ("fsdp", "torchtitan"),
         "mis.weight.normalize.scope: rollout needs the rollout batch, which no hook of Miles on "),
        ({"segment_wise": {}}, ("fsdp", "torchtitan", "vime"), " does not say which version wrote each token"),
        ({"weight": None, "reject": [{"upper": 2}], "on_all_rejected": "raise"}, ("fsdp", "torchtitan"),
         "mis.on_all_rejected: raise needs a hook before each train step, which Miles on "),
    ],
)  # fmt: skip
@every_host
def test_what_a_host_cannot_serve_is_refused(
    mis: dict[str, Any], refused: tuple[str, ...], said: str, host: str, config_command: ConfigCommand
):
    config_command({"mis": mis})
    told = config_command({"mis": mis}, "--host", host, code=2 if host in refused else 0).err
    assert (said in told) == (host in refused)
