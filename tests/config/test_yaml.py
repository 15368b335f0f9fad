"""Every preset loads, says what this table says, and is found from anywhere."""

import dataclasses
import math
import re
import shutil
import typing
from pathlib import Path
from types import SimpleNamespace

import oracle
import pytest
import torch
import yaml
from batches import ratio_batch
from commands import ROOT, ConfigCommand, ran
from documented import DOCUMENTED, VERL
from drive import assert_matches_oracle, run
from tolerances import weight_rtol

from lab.pages import presets as presets_page
from mis_plugins import mis
from mis_plugins.__main__ import load, main
from mis_plugins.config import loading, writing
from mis_plugins.config.loading import preset_path, presets
from mis_plugins.config.model import (
    CorrectionConfig,
    NormalizeConfig,
    ObjectiveConfig,
    OpsmConfig,
    RejectRule,
    SegmentWiseConfig,
    WeightConfig,
)
from mis_plugins.config.reading import choices_of, from_mapping
from mis_plugins.errors import ConfigError
from mis_plugins.explain import words as describe

FOLDER = ROOT / "yaml"
FILES = sorted(FOLDER.rglob("*.yaml"), key=lambda file: file.stem)
LONGEST = 120  # characters of a first line


each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def keys_of(file: Path) -> dict:
    return yaml.safe_load(file.read_text())


def plain(file: Path) -> dict:
    """What stands under `mis:`, with 1e-4, which is text to YAML, as a number."""
    return writing.as_mapping(from_mapping(keys_of(file)["mis"]))


def test_the_table_is_complete():
    assert presets().keys() >= DOCUMENTED.keys()
    assert not (FOLDER / "__init__.py").exists(), "it would shadow PyYAML"


@pytest.mark.parametrize("name", DOCUMENTED)
def test_equals_its_documented_config(name: str):
    assert load(preset_path(name)) == DOCUMENTED[name]


@each_file
def test_form(file: Path):
    """The formula, the source, the flags; short; one key, so that a typo cannot pass."""
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# w") and "=" in lines[0]
    assert max(map(len, lines)) <= LONGEST
    assert len(lines) < 25
    assert keys_of(file).keys() <= {"mis", "use_tis"}


@each_file
def test_names_the_flags_it_needs(file: Path):
    config = dataclasses.replace(load(file), metrics="core")  # all that a correction needs
    flags = describe.flags(config).removesuffix(f" {describe.TIS_HOOK}")
    instead = " in place of --use-tis" if flags == "--get-mismatch-metrics" else ""
    comments = [line for line in file.read_text().splitlines() if line.startswith("# ")]
    assert f"# Needs {flags}{instead}." in re.sub("\n# (?=--)", " ", "\n".join(comments)).splitlines()


@each_file
def test_formula_names_every_bound(file: Path):
    """1/1.001 and 1/0.999, which verl's k1 bounds come to, by that name."""
    headline = file.read_text().splitlines()[0]
    weight, rules = load(file).weight, load(file).reject
    bounds = [bound for rule in rules for bound in (rule.lower, rule.upper)]
    bounds += [weight.upper, weight.lower] if weight else []
    names = {1 / 1.001: "1/1.001", 1 / 0.999: "1/0.999", 1e-4: "1e-4"}
    for bound in filter(None, bounds):
        assert names.get(bound, f"{bound:g}") in headline


def test_every_preset_of_verl_is_here():
    assert {f"verl-{name.replace('_', '-')}" for name in VERL} <= presets().keys()


def served_alone(config: CorrectionConfig) -> bool:
    """Whether the TIS hook serves the config in a process without routers; tests/routing has those that need some."""
    return config.corrects and not (config.needs_loss_hook or config.reads_routes)


SERVED_BY_TIS_HOOK = [file for file in FILES if served_alone(load(file))]


@pytest.mark.parametrize("file", SERVED_BY_TIS_HOOK, ids=lambda file: file.stem)
def test_corrects_as_the_oracle_says(file: Path):
    ratios = [[0.995, 1.0, 1.003], [3.5, 0.9], [0.3, 1.2, 1.1], [1e-5, 1.0], [6.0], [1.0], [1.3, 9.0, 0.7, 1.02]]
    batch = ratio_batch(ratios, [[1] * len(row) for row in ratios[:-1]] + [[1, 0, 1, 1]])
    config = plain(file) | {"metrics": "full"}
    assert_matches_oracle(run(batch, config), batch, oracle.correct(batch.samples, config))


def test_a_product_of_2000_ratios_of_1_001():
    """What `sequence.yaml` and the length warning say, by the hook."""
    batch = ratio_batch([[1.001] * 2000])
    weight = run(batch, {"weight": {"level": "sequence", "bound": "none"}}).weights[0][0].item()
    total = math.fsum(batch.samples[0].log_ratios)
    assert weight == pytest.approx(math.exp(total), rel=weight_rtol(total))
    assert f"{weight:.2f}" == f"{1.001**2000:.2f}" == "7.38"
    assert "7.38" in (FOLDER / "sequence.yaml").read_text()


# ------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mis: {weight: {levle: token}}", "mis.weight.levle"),
        ("tis_level: seq\ntis_upper_bound: 2.0", "tis_level"),
        ("tis_upper_bound: -1", "tis_upper_bound"),
        ("mis: {weight: {}}\ntis_level: token", "both"),
        ("[1, 2]", "mapping"),
        ("mis: {weight: ", ""),  # not yaml
        ("miss: {weight: {upper: 2.0}}", "nothing says how to correct"),  # a typo of the key itself
        ("tis_level: sequence", "tis_upper_bound"),
        ("{}", "nothing says how to correct"),
        ("mis:", "yaml: nothing says how to correct: pass a preset"),  # and blames no flag
        ("", "empty"),
        ("# nothing yet\n", "empty"),
        ("mis: {weight: {upper: 2}}\nmis: {weight: {upper: 5}}", "mis: in line 1 and again in line 2"),
        ("mis: {weight: {upper: 2, upper: 5}}", "upper: in line 1 and again"),
        ("tis_upper_bound: 2\n\ntis_upper_bound: 5", "tis_upper_bound: in line 1 and again in line 3"),
        ("mis: {weight: {upper: 2}}\nreject: [{over: min, lower: 1e-4}]", "reject: stands beside `mis:`"),
        ("use_tis: 'false'\ntis_upper_bound: 2", "use_tis: got 'false'; expected true or false"),
        ("get_mismatch_metrics: 1\ntis_upper_bound: 2", "get_mismatch_metrics: got 1"),
    ],
)
@pytest.mark.parametrize("command", ["check", "show"])
def test_check_refuses(command: str, text: str, message: str, tmp_path: Path, config_command: ConfigCommand):
    """Exit code 2, the key on stderr: the launch scripts stop before the job."""
    told = config_command(text, command=command, code=2).err
    assert str(tmp_path / "my config.yaml") in told and message in told


def test_check_refuses_what_is_no_text_or_no_file(tmp_path: Path, capsys: pytest.CaptureFixture):
    file = tmp_path / "broken.yaml"
    file.write_bytes("mis: {weight: {upper: 2}}".encode("utf-16"))
    for path, said in ((file, "byte 0 is not UTF-8"), ("nowhere.yaml", "nowhere.yaml")):
        assert main(["config", "check", str(path)]) == 2
        assert said in capsys.readouterr().err


def test_a_merged_key_may_be_overridden(config_command: ConfigCommand):
    """`<<` puts in keys that others win over: no key stands twice, nor where the same anchor is merged again."""
    told = config_command(
        "one: &one {upper: 3}\ntwo: {deeper: &two {<<: *one, upper: 4, bound: clip}}\n"
        "mis: {weight: {<<: *two, <<: *one, upper: 5}}"
    )
    assert "clipped to [0.2, 5]" in told.out


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("use_tis: false", "use_tis: false wins over --use-tis"),
        ("use_tis: true\nget_mismatch_metrics: true", "are both set: the loss is corrected"),
        ("use_tis: false\nget_mismatch_metrics: true", "use_tis: false wins over --use-tis"),
        ("get_mismatch_metrics: true", "get_mismatch_metrics: true corrects nothing by itself"),
        ("use_tis: true", None),
        ("get_mismatch_metrics: false", None),
    ],
)
def test_check_warns_of_the_hosts_own_switches(text: str, warning: str | None, config_command: ConfigCommand):
    """A host sets its arguments from the file last, whatever the command line said."""
    told = config_command(f"tis_upper_bound: 2.0\n{text}").out
    warnings = [line for line in told.splitlines() if line.startswith("warning:")]
    assert len(warnings) == (warning is not None) and (warning or "") in "".join(warnings)


NOTHING = "warning: metrics: none alone weighs nothing, drops nothing and reports nothing"
# KL and entropy that the file itself asks for, which the TIS hook is not handed.
POLICY_ALONE = "warning: mis.denominator: kept is that of the policy term alone"
KEPT = "mis: {weight: null, reject: [{upper: 2}], denominator: kept}"


@pytest.mark.parametrize(
    ("text", "warning", "warns"),
    [
        ("mis: {metrics: none}", NOTHING, True),
        ("mis: {metrics: core}", NOTHING, False),
        ("mis: {weight: {upper: 2}, metrics: none}", NOTHING, False),
        ("mis: {weight: null, reject: [{over: min, lower: 1e-4}], metrics: none}", NOTHING, False),
        ("mis: {opsm: {delta: 1e-4}, metrics: none}", NOTHING, False),
        (f"use_kl_loss: true\n{KEPT}", POLICY_ALONE, True),
        (f"entropy_coef: 0.01\n{KEPT}", POLICY_ALONE, True),
        (f"use_kl_loss: false\nentropy_coef: 0\n{KEPT}", POLICY_ALONE, False),
        (f"use_kl_loss: true\n{KEPT[:-1]}, objective: {{}}}}", POLICY_ALONE, False),
    ],
)
def test_check_warns_of_what_has_no_effect(text: str, warning: str, warns: bool, config_command: ConfigCommand):
    assert (warning in config_command(text).out) == warns


def test_list_tells_every_formula(capsys: pytest.CaptureFixture):
    assert main(["config", "list"]) == 0
    told = capsys.readouterr().out.splitlines()
    for name, file in presets().items():
        headline = file.read_text().splitlines()[0].removeprefix("# ")
        assert any(line.split()[:1] == [name] and line.endswith(headline) for line in told), name


@pytest.mark.parametrize("command", ["list", "path mis", "check mis"])
def test_only_show_needs_torch(command: str):
    """A launch script asks before every job: blocked, an import of torch would raise."""
    block = "import sys; sys.modules['torch'] = None; from mis_plugins.__main__ import main; "
    done = ran("-c", f"{block}sys.exit(main('config {command}'.split()))")
    assert done.returncode == 0, done.stderr


@each_file
def test_check_describes_and_one_rule_says_which_file_corrects(file: Path, capsys: pytest.CaptureFixture):
    """The file of the TIS hook corrects by itself; with --watch it never does; the loss hook has neither."""
    config, weight = load(file), load(file).weight
    assert main(["config", "check", str(file)]) == 0
    told = capsys.readouterr().out
    assert weight is None or weight.upper is None or f"{weight.upper:g}" in told
    assert told.count("reject:") + told.count("down-weigh:") == len(config.reject)
    by_tis_hook = config.corrects and not config.needs_loss_hook
    assert keys_of(file).get("use_tis") == (True if by_tis_hook else None)
    code = main(["config", "path", file.stem, "--watch"])
    printed = capsys.readouterr()
    if config.needs_loss_hook:
        assert code == 2 and "a preset of the loss hook corrects whatever use_tis says" in printed.err
        return
    watched = load(Path(printed.out.strip()))
    assert code == 0 and "use_tis" not in keys_of(Path(printed.out.strip()))
    assert watched == CorrectionConfig(), "the step hook logs every metric of the preset"
    assert ("switch: use_tis: true in the file corrects, whatever the command line says" in told) == by_tis_hook


def test_a_file_of_yours_has_no_other_that_watches(tmp_path: Path, capsys: pytest.CaptureFixture):
    file = tmp_path / "mine.yaml"
    file.write_text("tis_upper_bound: 2.0\n")
    assert main(["config", "path", str(file), "--watch"]) == 2
    assert "in a file of yours drop use_tis: true" in capsys.readouterr().err
    assert main(["config", "check", str(file)]) == 0
    assert "switch: without use_tis in the file, --use-tis on the command line corrects" in capsys.readouterr().out


FLAGS = [{"use_tis": True}, {"get_mismatch_metrics": True}, {"use_tis": True, "get_mismatch_metrics": True}, {}]


CORRECTING = [file for file in FILES if load(file).corrects]
MEGATRON, BY_FSDP = "compute_mis_weights_with_cp", "compute_mis_weights_fsdp"


@pytest.mark.parametrize(
    ("file", "hook", "flags"),
    [
        *((file, MEGATRON, {}) for file in CORRECTING),
        *((preset_path("mis"), hook, flags) for hook in (MEGATRON, BY_FSDP) for flags in FLAGS),
    ],
    ids=str,
)
def test_the_file_decides_whatever_the_flags_say(file: Path, hook: str, flags: dict, monkeypatch: pytest.MonkeyPatch):
    """What a host does: it sets each key of the file over its flags, and calls the TIS hook where either is on."""
    config = load(file)
    if config.needs_loss_hook or config.reads_routes:
        return
    batch = ratio_batch([[0.5, 2.5], [1.2, 0.3, 40.0]])
    for path, corrects in ((file, True), (preset_path("metrics-only"), False)):
        if not corrects and "use_tis" in flags:
            continue  # refused: nothing says how to correct
        flagged = {"use_tis": False, "get_mismatch_metrics": False} | flags
        args = SimpleNamespace(qkv_format="thd", **(flagged | keys_of(path)))
        kwargs = batch.hook_kwargs()
        if hook.endswith("fsdp"):
            kwargs = {"pg_loss": kwargs["pg_loss"], **batch.lists()}
        loss, _, _ = getattr(mis, hook)(args, **kwargs)
        assert torch.equal(loss, kwargs["pg_loss"]) != corrects


def test_a_preset_is_found_from_another_folder(tmp_path: Path):
    """What `--custom-config-path $(python -m mis_plugins config path tis)` runs."""
    found = ran("-m", "mis_plugins", "config", "path", "mis", folder=tmp_path)
    assert Path(found.stdout.strip()).read_text() == (FOLDER / "mis.yaml").read_text()


def test_an_unknown_preset(capsys: pytest.CaptureFixture):
    with pytest.raises(ConfigError, match="preset 'miss': unknown; did you mean mis"):
        preset_path("miss")
    assert main(["config", "show", "verl-decoupled-geo"]) == 2
    assert "did you mean verl-decoupled-geo-rs?" in capsys.readouterr().err


def test_an_empty_option_as_of_an_unset_variable_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    script, run = tmp_path / "run.sh", tmp_path / "run.jsonl"
    script.write_text("python3 train.py --actor-num-nodes 1\n")
    run.write_text('{"behavior_log_probs": [-1.0], "proximal_log_probs": [-1.0]}\n')
    for words in (["config", "check", str(script), "--preset"], ["report", str(run), "--config"], ["config", "show"]):
        assert main([*words, ""]) == 2
        assert "preset '': unknown; `python -m mis_plugins config list` names all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("TIS", "TIS: preset 'TIS': unknown; did you mean tis?"),
        ("qqqq", "qqqq: preset 'qqqq': unknown; `python -m mis_plugins config list` names all"),
        ("/", "/: preset '/': unknown; it is a folder, and a file is expected"),
        ("TIS.yaml", "TIS.yaml: No such file or directory; did you mean the preset tis?"),
        ("absent.yaml", "absent.yaml: No such file or directory"),
    ],
)
def test_a_name_that_is_no_preset_and_no_file(target: str, message: str, capsys: pytest.CaptureFixture):
    for command in ("show", "check", "path"):
        assert main(["config", command, target]) == 2
        assert capsys.readouterr().err.strip() == message


def test_a_name_that_is_too_long_for_a_file_is_no_preset():
    with pytest.raises(ConfigError, match="unknown; `python -m mis_plugins config list` names all"):
        preset_path("a" * 300)


def test_a_translator_offers_no_preset_in_the_place_of_a_file(capsys: pytest.CaptureFixture):
    assert main(["config", "from-trl", "TIS.sh"]) == 2
    assert capsys.readouterr().err.strip() == "TIS.sh: No such file or directory"


# --------------------------------------------------------------------------------------------------------- documents

README = (ROOT / "README.md").read_text(encoding="utf-8")
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
PRESETS_DOC = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")


def test_the_committed_page_of_presets_is_the_generated_one():
    assert presets_page.page(PRESETS_DOC) == PRESETS_DOC, "python -m lab.pages.presets"


def a_folder_of_presets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copied = Path(shutil.copytree(FOLDER, folder / "yaml"))
    monkeypatch.setattr(loading, "_preset_folder", lambda: copied)
    return copied


def test_one_config_is_one_file():
    found = [(load(file), keys_of(file).get("use_tis")) for file in FILES]
    assert len(set(found)) == len(FILES)


def test_another_name_is_a_line_of_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A further name finds its preset, is listed with its package, and has its own source and judge."""
    file = a_folder_of_presets(tmp_path, monkeypatch) / "tis.yaml"
    line = "# Also trl-mine: TRL, mine | TRL, run\n"
    head, rest = file.read_text().split("# Needs", 1)
    file.write_text(f"{head}{line}# Needs{rest}")
    assert preset_path("trl-mine") == preset_path("tis") == file
    grouped = loading.families(presets())
    assert "trl-mine" in grouped["trl"] and {"trl-mine", "tis"} <= set(grouped["token"])
    row = "| [`trl-mine`](../yaml/tis.yaml) | `w_t = min(r_t, 2); r = pi_old/mu` | TRL, mine | TRL, run |"
    assert row in presets_page.page(PRESETS_DOC).partition("peers/trl-")[2].partition("<!--")[0]


@pytest.mark.parametrize("place", ["mine.yaml", "peers/trl-mine.yaml", "peers/newcomer-mine.yaml"])
def test_a_new_preset_is_one_file(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ours, of a package that the page knows, of one that it does not: found by name, listed, and on the page."""
    file = a_folder_of_presets(tmp_path, monkeypatch) / place
    file.write_text("# w_t = 7; r = pi_old/mu\n# Nowhere\n# Judged by: nobody\nmis: {weight: {upper: 7}}\n")
    assert preset_path(file.stem) == file
    page = presets_page.page(PRESETS_DOC)
    row = f"| [`{file.stem}`](../yaml/{place}) | `w_t = 7; r = pi_old/mu` | Nowhere | nobody |"
    assert page.count(row) == 1
    assert presets_page.page(page) == page
    kept = page.replace(f"{row}\n", "").partition("\n## newcomer\n")[0]
    assert kept == PRESETS_DOC, "nothing else of the page changes"


WHOLE = """# w_t = min(r_t, 3.5); r = pi_old/mu
# Nowhere
# Needs --use-tis.
# Judged by: nobody
use_tis: true
mis: {weight: {upper: 3.5}}
"""


@pytest.mark.parametrize("place", ["mine.yaml", "peers/newcomer-mine.yaml"])
def test_a_new_preset_is_held_to_what_every_preset_is(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """The file alone is listed, checked, shown, and compared with the oracle; no table beside it names it."""
    file = a_folder_of_presets(tmp_path, monkeypatch) / place
    file.write_text(WHOLE)
    test_form(file)
    test_names_the_flags_it_needs(file)
    test_formula_names_every_bound(file)
    test_corrects_as_the_oracle_says(file)
    test_check_describes_and_one_rule_says_which_file_corrects(file, capsys)
    assert main(["config", "list"]) == main(["config", "show", file.stem]) == 0
    told = capsys.readouterr().out
    assert re.search(rf"^ *{file.stem} .*w_t = min\(r_t, 3\.5\); r = pi_old/mu$", told, re.MULTILINE)
    assert "w_t    = min(r_t, 3.5)" in told
    assert file.stem not in DOCUMENTED


def test_the_top_of_the_folder_is_ours():
    """No preset at the top is named after a package whose presets stand in `peers/`."""
    packages = {file.stem.partition("-")[0] for file in FOLDER.glob("peers/*.yaml")}
    top = {file.stem for file in FOLDER.glob("*.yaml")}
    assert top and not {name for name in top if name.partition("-")[0] in packages}
    assert all(file.parent in (FOLDER, FOLDER / "peers") for file in FILES)
    assert len({file.stem for file in FILES}) == len(FILES), "two presets of one name"


def test_algorithms_show_every_setting():
    """The block under "In full" is read as it stands, holds the defaults, and names every key and every choice."""
    block = ALGORITHMS.partition("In full, with the defaults:\n\n```yaml\n")[2].partition("```")[0]
    assert from_mapping(yaml.safe_load(block)["mis"]) == CorrectionConfig(WeightConfig())
    blocks = (WeightConfig, NormalizeConfig, RejectRule, OpsmConfig, ObjectiveConfig, SegmentWiseConfig)
    for part in (CorrectionConfig, *blocks):
        for name, kind in typing.get_type_hints(part, include_extras=True).items():
            assert re.search(rf"\b{name}\b", block), name
            for choice in choices_of(kind) or ():
                assert re.search(rf"\b{choice}\b", block), f"{name}: {choice}"


@pytest.mark.parametrize("said", re.findall(r"\| `(\{.*\})` \|", ALGORITHMS))
def test_a_config_to_copy_is_good(said: str):
    assert from_mapping(yaml.safe_load(said)) != CorrectionConfig()


PRESETS_TO_CHOOSE = re.findall(r"^\| .* \| `([\w-]+)` \| .* \|$", README, re.MULTILINE)


def test_the_readme_lets_choose_among_presets_that_are_there():
    assert len(PRESETS_TO_CHOOSE) == 5
    assert set(PRESETS_TO_CHOOSE) == set(loading.START)


@pytest.mark.parametrize("name", ["tis", ".", ""])
def test_a_folder_is_no_config(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tis").mkdir()
    assert main(["config", "path", name]) == (0 if name == "tis" else 2)
    assert "tis.yaml" in capsys.readouterr().out or name != "tis"
