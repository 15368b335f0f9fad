"""The real vLLM behind its HTTP server on loopback, in the environment that install.sh made, on CPU."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float32
from torch import Tensor

from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.sides import ENGINES
from true_on_policy.contract.specs import NormOrder
from true_on_policy.engines import server
from true_on_policy.engines.asking import check_counts, list_of, reading, short, whole
from true_on_policy.engines.handover import ASKED, FORKS, handed_over
from true_on_policy.engines.protocol import EngineError, Request, Sample, log_probs
from true_on_policy.engines.server import Served
from true_on_policy.engines.vllm import plugin

PATH = "/inference/v1/generate"
GUARD = "true_on_policy.engines.vllm.plugin.Guard"
BLOCK = 32  # slots of a block of the key-value cache


@dataclass(frozen=True)
class Pool:
    """A pool says how the server schedules.

    blocks: blocks of the key-value cache; where running requests need more, some are preempted.
    running: sequences in one decode batch, at most.
    prefill_chunk: tokens that one step computes, at most.
    """

    blocks: int = 512
    running: int = 8
    prefill_chunk: int = 128


def start(checkpoint: Path, contract: Contract, order: NormOrder | None) -> "VLLM":
    """Start the server of a proof; without an `order` the server is stock."""
    return VLLM(checkpoint, contract.dtype, contract if order is not None else None, order)


class VLLM(Served):
    """vLLM's server, stock where `contract` is None, else on the kernels that our plugin pins.

    Args:
        order: the order of rounding under a contract; None is vLLM's own.

    Raises:
        EngineError: vLLM's environment is missing, or the server did not come up.
    """

    name = "vllm"

    def __init__(
        self,
        checkpoint: Path,
        dtype: str,
        contract: Contract | None = None,
        order: NormOrder | None = None,
        pool: Pool = Pool(),
    ):
        if contract is not None and contract.leaves > 1:
            raise EngineError(
                f"{{contract.leaves}}: {contract.leaves}: vLLM adds up no tree; give 1, or another engine"
            )
        self._version = 0
        command = [str(server.interpreter(self.name)), *_arguments(checkpoint, dtype, pool)]
        self._server = server.started(self.name, command, _environment(contract, order))
        if contract is not None:
            self._server.check_pinned()
        self._senders = ThreadPoolExecutor(pool.running)

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        seconds = server.patience(requests)
        answers = self._senders.map(lambda asked: self._ask(asked.prompt, _sampling(asked), seconds), requests)
        with reading(PATH, self.name):
            return [self._sample(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def _ask(self, tokens: Sequence[int], sampling: Mapping[str, Any], seconds: float = server.GENERATE_SECONDS) -> Any:
        body = {"token_ids": list(tokens), "sampling_params": {"detokenize": False, **sampling}}
        return self._server.post(PATH, body, seconds)

    def _sample(self, request: Request, answer: Any) -> Sample:
        [choice] = answer["choices"]
        rows, tokens = choice["logprobs"]["content"], choice["token_ids"]
        if [row["token_id"] for row in rows] != tokens or not request.over(tokens):
            raise EngineError(f"vllm: {request.length} tokens asked, got {short(tokens)} and {short(rows)}")
        ids = tuple(whole(token, "token id") for token in tokens)
        drawn = log_probs(row["logprob"] for row in rows)
        usage = answer["usage"]
        check_counts(usage, len(request.prompt), len(ids))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Sample(request, ids, drawn, self._version, whole(cached, "cached_tokens"))

    def score(self, samples: Sequence[Sample]) -> list[Float32[Tensor, "_"]]:
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        answers = self._senders.map(lambda sample: self._ask(sample.sequence, sampling), samples)
        with reading(PATH, self.name):
            return [_scored(sample, answer) for sample, answer in zip(samples, answers, strict=True)]

    def update_weights(self, checkpoint: Path, version: int, keep_cache: bool = False) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
        self._server.post(plugin.PATH, call)
        deadline = time.monotonic() + (seconds := server.GENERATE_SECONDS)
        while not keep_cache and not self._dropped_cache():
            if time.monotonic() > deadline:
                raise EngineError(f"vllm: the cache of the previous weights is still in use after {seconds} s")
            time.sleep(server.POLL_SECONDS)
        self._version = version

    def _dropped_cache(self) -> bool:
        """Ask vLLM to drop its cache, and return whether it did: it answers 200 and keeps it while a request runs."""
        answer = self._server.post("/reset_prefix_cache", {})
        with reading("/reset_prefix_cache", self.name):
            return answer["success"] is True

    def weights_checker(self, body: Mapping[str, Any]) -> Any:
        """Ask each worker for its weights, which our plugin tells, in the form of SGLang's answer."""
        answer = self._server.post(plugin.PATH, plugin.request(body))
        with reading(plugin.PATH, self.name):
            return plugin.answer_as_sglang(answer)

    def close(self) -> None:
        super().close()
        self._senders.shutdown(wait=False)  # a request that still waits has its error by now


def _sampling(request: Request) -> dict[str, Any]:
    # No seed: with a seed, vLLM 0.32 on CPU crashes on a prompt that is prefilled in chunks.
    sampling = {"temperature": request.temperature, "max_tokens": request.length, "ignore_eos": True, "logprobs": 0}
    return sampling if request.end is None else sampling | {"stop_token_ids": [request.end]}


def _scored(sample: Sample, answer: Any) -> Float32[Tensor, "N"]:
    prompt_rows = list_of(answer["prompt_logprobs"], len(sample.sequence), "log-probs of tokens")
    rows = prompt_rows[-len(sample.tokens) :]
    of_tokens = [row.get(str(token)) for row, token in zip(rows, sample.tokens, strict=True)]
    return log_probs(None if row is None else row["logprob"] for row in of_tokens)


def _arguments(checkpoint: Path, dtype: str, pool: Pool) -> list[str]:
    options = {
        "model": checkpoint,
        "dtype": server.DTYPES[dtype],
        "max-num-seqs": pool.running,
        "max-num-batched-tokens": pool.prefill_chunk,
        "num-gpu-blocks-override": pool.blocks,
        "block-size": BLOCK,
        "kv-cache-memory-bytes": 1 << 28,
        "logprobs-mode": "processed_logprobs",  # log-probs of the sampled distribution, after temperature
        "generation-config": "vllm",
        "host": "127.0.0.1",
        "middleware": GUARD,
    }
    flags = ("tokens-only", "skip-tokenizer-init", "enforce-eager", "enable-chunked-prefill")
    flags += ("enable-prefix-caching", "enable-prompt-tokens-details")
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    return [*module, *server.named(options), *(f"--{flag}" for flag in flags)]


def _environment(contract: Contract | None, order: NormOrder | None) -> dict[str, str]:
    added = {
        "VLLM_SERVER_DEV_MODE": "1",  # serves /collective_rpc and /reset_prefix_cache
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": "",  # of the user's other servers; Guard asks for the key of the run
        "VLLM_LOGGING_LEVEL": "INFO",
        ASKED: "1",
        FORKS: "1",
    }
    # vLLM's own norm may be a compiled kernel: a pinned engine always takes our norm, even in vLLM's order.
    return server.inherited() | added | handed_over(contract, contract and (order or ENGINES["vllm"].order))
