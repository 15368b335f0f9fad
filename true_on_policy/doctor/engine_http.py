"""Observe a running SGLang over HTTP: what its server tells, and what its log-probs show.

HTTP does not show the server's environment and kernels; `engines/sglang/settings.py` observes them from inside. The
requests are few and short, but real: an engine that serves a training run answers them in between.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from secrets import token_hex
from typing import Any, TypeVar

from jaxtyping import Float32
from torch import Tensor

from true_on_policy.bitwise import equal_bits, first_mismatch
from true_on_policy.contract.settings import OF_SERVER
from true_on_policy.engines.asking import answer_of, check_counts, list_of, reading, short
from true_on_policy.engines.protocol import sglang_rows
from true_on_policy.errors import EngineError
from true_on_policy.flags.command import REFUSALS
from true_on_policy.observe.process import ALL, Observation

T = TypeVar("T")
SECONDS = 60
# Token ids that every vocabulary has.
PROMPT = tuple(range(11, 51))
COMPANY = tuple(tuple(range(20 + n, 40 + 9 * n)) for n in range(7))
LENGTH = 16
LONGEST = 100  # letters of a setting
TOKENS = "log-probs of tokens"

VERSION = "SGLang"  # the only row of OF_SERVER that is not an argument of the server
REFUSED = "refused arguments"
PREFIX = "sglang_"  # before the name of SGLang's argument among a host's
ATTENTION = ("prefill_attention_backend", "decode_attention_backend")


def observe_engine(url: str) -> Observation:
    """Observe and probe the engine behind `url`; each row that could not be seen has a reason."""
    url = url.rstrip("/")
    try:
        settings = _asked(url, "/server_info", None, _told)
    except EngineError as error:
        return Observation({}, {ALL: str(error)})
    unseen = {row: f"/server_info tells no {name}" for row, name in OF_SERVER.items() if row not in settings}
    configured = tuple(settings.keys() - {VERSION})
    try:
        settings |= _probed(url)
    except EngineError as error:
        unseen |= dict.fromkeys(PROBED, f"could not compare: {error}")
    return Observation(settings, unseen, configured)


def _told(info: Any) -> dict[str, str]:
    if "version" not in info:
        raise EngineError("not an answer of SGLang")
    settings = {row: _plain(name, info[name]) for row, name in OF_SERVER.items() if name in info}
    settings.setdefault("contract", "not in this release")
    settings[REFUSED] = ", ".join(_refused(info))[:LONGEST] or "none"
    if phases := info.get("cuda_graph_config"):
        graphs = (f"{name} {_plain('backend', phase['backend'])}" for name, phase in phases.items())
        settings["CUDA graph"] = ", ".join(graphs)[:LONGEST]
    names = {info.get(name) or info.get("attention_backend") for name in ATTENTION}
    return settings | {"attention": " and ".join(sorted(_plain("attention", name) for name in names))}


def _refused(info: Mapping[str, Any]) -> Iterator[str]:
    """Yield each argument of the server that a launch may not have; a server that lacks an argument keeps to it."""
    for rule in REFUSALS:
        name = rule.attribute.removeprefix(PREFIX)
        if name != rule.attribute and (given := info.get(name, rule.allowed[0])) not in rule.allowed:
            yield f"{name}={short(given)}"


def _plain(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value != name.startswith("disable_") else "off"
    if not isinstance(value, str | int | float | None):
        raise EngineError(f"{name}: expected a text or a number; got {short(value)}")
    return str(value)[:LONGEST]


ALONE = "decode alone and in a batch"
PREFILLED = "prefill alone and in a batch"
SCORED = "decode and prefill"
SEEDS = "seeds of a prompt's samples"
LOG_SOFTMAX = "log-softmax"
PROBED = (ALONE, PREFILLED, SCORED, SEEDS, LOG_SOFTMAX)


def _probed(url: str) -> dict[str, str]:
    """Probe the engine's log-probs, sampled greedily so that an engine without seeds repeats its answer."""
    alone = _generate(url, [PROMPT])[0]
    together = _generate(url, [PROMPT, *COMPANY])[0]
    sequence = (*PROMPT, *alone[0])
    scored = _score(url, [sequence])
    # The sequence goes last: an engine may start the first request before the others arrive.
    among = _score(url, [*COMPANY, sequence])
    return {
        ALONE: _compared(alone, together),
        PREFILLED: _compared(scored, among),
        SCORED: _compared(alone, (scored[0][-LENGTH:], scored[1][-LENGTH:])),
        SEEDS: _seeds(url),
        LOG_SOFTMAX: _dtype(scored[1]),
    }


def _dtype(log_probs: Float32[Tensor, "N"]) -> str:
    """Tell the dtype to which log-probs of prefill were rounded last; a CUDA graph of decode widens its logits."""
    return "bf16" if equal_bits(log_probs.bfloat16().float(), log_probs) else "fp32"


def _seeds(url: str) -> str:
    """Probe whether the seed of a request decides what is sampled."""
    first, second, again = (_generate(url, [PROMPT], seed)[0][0] for seed in (1, 2, 1))
    if first != again:
        return "without effect"
    return "one for all" if first == second else "one each"


Answer = tuple[tuple[int, ...], Float32[Tensor, "N"]]


def _compared(a: Answer, b: Answer) -> str:
    """Compare two answers by bytes; other tokens are a difference too."""
    if a[0] != b[0]:
        return "other tokens"
    mismatch = first_mismatch(a[1], b[1])
    return "equal" if mismatch is None else f"{mismatch.count} of {mismatch.total} log-probs differ"


def _asked(url: str, path: str, body: Mapping[str, Any] | None, read: Callable[[Any], T]) -> T:
    """Ask SGLang and read its answer; raises EngineError where the server does not answer."""
    answer = answer_of(url, path, body, SECONDS)
    with reading(f"{url}{path}", "SGLang"):
        return read(answer)


def _generate(url: str, prompts: Sequence[Sequence[int]], seed: int | None = None) -> list[Answer]:
    """Generate LENGTH tokens for each prompt: greedily without a seed, at temperature 1 with a seed."""
    drawn = {"temperature": 0} if seed is None else {"temperature": 1, "sampling_seed": seed}
    sampling = {"max_new_tokens": LENGTH, "ignore_eos": True, **drawn}
    return _answered(url, prompts, sampling, lambda answers: [*map(_sampled, prompts, answers)])


def _score(url: str, sequences: Sequence[Sequence[int]]) -> Answer:
    """Score every token of the last sequence but its first, by prefill of all sequences without a cache."""
    sampling = {"max_new_tokens": 0, "temperature": 0}
    return _answered(url, sequences, sampling, lambda got: _scored(sequences[-1], got[-1]), logprob_start_len=0)


def _answered(
    url: str, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any], read: Callable[[list], T], **more: int
) -> T:
    """Read the answers of /generate, one for each prompt; each request has a name of its own, which SGLang repeats."""
    body = {"input_ids": [*map(list, prompts)], "sampling_params": sampling, "return_logprob": True, **more}
    name = token_hex()

    def checked(answers: Any) -> T:
        for answer in list_of(answers, len(prompts), "answers"):
            if not str(answer["meta_info"].get("id", name)).startswith(name):
                raise EngineError("the answer to another request; name the engine's own address, and no cache or proxy")
        return read(answers)

    return _asked(url, "/generate", body | {"rid": name}, checked)


def _sampled(prompt: Sequence[int], answer: Any) -> Answer:
    meta = answer["meta_info"]
    check_counts(meta, len(prompt), LENGTH)
    rows = sglang_rows(list_of(meta["output_token_logprobs"], LENGTH, TOKENS))
    if answer.get("output_ids", [*rows[0]]) != [*rows[0]]:
        raise EngineError("log-probs of other tokens than were sampled")
    return rows


def _scored(sequence: Sequence[int], answer: Any) -> Answer:
    meta = answer["meta_info"]
    check_counts(meta, len(sequence))
    (_, first, *_), *rows = list_of(meta["input_token_logprobs"], len(sequence), TOKENS)
    later, log_probs = sglang_rows(rows)
    # SGLang reports the last id of its vocabulary as 0.
    if any(
        scored != token and (scored or token != max(sequence))
        for scored, token in zip((first, *later), sequence, strict=True)
    ):
        raise EngineError("log-probs of other tokens than were asked for")
    if len({*log_probs.tolist()}) == 1:
        raise EngineError(f"{log_probs[0]:g} is the log-prob of every token, which no model gives")
    return tuple(sequence[1:]), log_probs
