"""A config as the YAML that `config/reading.py` reads back."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from mis_plugins.config import model
from mis_plugins.config.model import CorrectionConfig

# Written even where they are the default: a reader need not know the default.
SPELLED_OUT: dict[type, tuple[str, ...]] = {
    CorrectionConfig: ("metrics",),
    model.WeightConfig: ("level", "bound", "upper"),
    model.NormalizeConfig: ("scope", "over"),
    model.RejectRule: ("over",),
    model.OpsmConfig: ("delta", "advantage", "reference"),
    model.ObjectiveConfig: ("old", "surrogate"),
    model.SegmentWiseConfig: ("enabled",),
    model.RoutingConfig: ("experts", "on_fault"),
    model.CenterConfig: ("top_k",),
}
# One setting a line; everything else stands on the line of its key.
BLOCKS = ("weight", "opsm", "objective", "segment_wise", "routing")
Line = tuple[str, str]  # text, comment


def as_mapping(config: CorrectionConfig) -> dict[str, Any]:
    """What stands under `mis:`, most defaults left out. `reading.from_mapping` gives the same config back."""
    mapping = _plain(config)
    if config.segment_wise is None:
        return {"weight": None} | mapping if config.reject and config.weight is None else mapping
    if config.weighs_by_segment_wise:
        del mapping["weight"]  # `segment_wise` implies it
        bounds = {name: getattr(config.segment_wise, name) for name in ("weight_cap", "mode")}
        mapping["segment_wise"] = {"enabled": config.segment_wise.enabled} | bounds | mapping["segment_wise"]
    return mapping


def to_yaml(mis: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """The file, one setting a line; `comments` go by the path of a setting: `weight.upper`, `reject[0]`."""
    lines = [("mis:", ""), *_lines(mis, comments or {}, "", "  ")]
    width = max(len(text) for text, _ in lines)
    return "\n".join(f"{text:<{width}}  # {comment}" if comment else text for text, comment in lines)


def _plain(part: Any) -> Any:
    if isinstance(part, tuple):
        return [_plain(item) for item in part]
    if not dataclasses.is_dataclass(part):
        return part
    values = ((field, getattr(part, field.name)) for field in dataclasses.fields(part))
    spelled_out = SPELLED_OUT[type(part)]
    return {of.name: _plain(x) for of, x in values if x != of.default or x is not None and of.name in spelled_out}


def _lines(mapping: Mapping[str, Any], comments: Mapping[str, str], path: str, indent: str) -> Iterator[Line]:
    for key, value in mapping.items():
        comment = comments.get(path + key, "")
        if key in BLOCKS and value:
            yield f"{indent}{key}:", comment
            yield from _lines(value, comments, f"{path}{key}.", indent + "  ")
        elif isinstance(value, list) and value:
            yield f"{indent}{key}:", comment
            for i, item in enumerate(value):
                yield f"{indent}  - {flow(item)}", comments.get(f"{path}{key}[{i}]", "")
        else:
            yield f"{indent}{key}: {flow(value)}", comment


class _Dumper(yaml.SafeDumper):
    """Writes text of a class of its own, as the translators have, as text; PyYAML's own dumper refuses it."""


_Dumper.add_multi_representer(str, yaml.SafeDumper.represent_str)


def flow(value: Any) -> str:
    """A value as YAML in one line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("...\n").strip()
