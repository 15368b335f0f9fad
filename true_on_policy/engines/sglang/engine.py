"""The real SGLang behind its HTTP server on loopback, in the environment that install.sh made, on CPU."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from jaxtyping import Float32
from torch import Tensor

from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.model_config import text_of
from true_on_policy.contract.sides import ENGINES
from true_on_policy.contract.specs import NormOrder
from true_on_policy.engines import server
from true_on_policy.engines.asking import check_counts, list_of, reading, short, whole
from true_on_policy.engines.handover import ASKED, FORKS, handed_over
from true_on_policy.engines.protocol import EngineError, Request, Sample, log_probs, sglang_rows
from true_on_policy.engines.server import Served

Target = Literal["fsdp"]


@dataclass(frozen=True)
class Pool:
    """A pool says how the server schedules.

    cached_tokens: slots of the key-value cache; where running requests need more, some are preempted.
    running: sequences in one decode batch, at most.
    prefill_chunk: tokens of prefill at a time; None takes a prompt whole.
    retract_every: decode steps between two forced preemptions; None forces no preemption.
    """

    cached_tokens: int = 16384
    running: int = 8
    prefill_chunk: int | None = None
    retract_every: int | None = None


# A proof covers prefill in chunks and forced preemptions.
PROOF = Pool(prefill_chunk=128, retract_every=40)


def start(checkpoint: Path, contract: Contract, order: NormOrder | None) -> "SGLang":
    """Start the server of a proof; without an `order` the server is stock."""
    pinned_to = contract if order is not None else None
    follows = order if order != ENGINES["sglang"].order else None
    return SGLang(checkpoint, contract.dtype, pinned_to, follows, PROOF, contract.engine_tensor_parallel)


class SGLang(Served):
    """SGLang's server, stock where `contract` is None, else pinned by our plugin in deterministic mode.

    Args:
        order: the order of rounding, where the engine follows the trainer; None is SGLang's own.
        ranks: processes over which SGLang splits the model (tensor parallelism), over gloo.
        target: SGLang's `--rl-on-policy-target`; decode then reports log-probs in bf16, prefill in float32.

    Raises:
        EngineError: SGLang's environment is missing, or the server did not come up.
    """

    name = "sglang"

    def __init__(
        self,
        checkpoint: Path,
        dtype: str,
        contract: Contract | None = None,
        order: NormOrder | None = None,
        pool: Pool = Pool(),
        ranks: int = 1,
        target: Target | None = None,
    ):
        asked = common_arguments(checkpoint, dtype, pool) + ["--disable-cuda-graph"]
        # SGLang's own guess of the memory is negative on a small machine; max-total-tokens decides.
        here = {"device": "cpu", "attention-backend": "torch_native", "mem-fraction-static": 0.5}
        asked += server.named(here | {"tp-size": ranks})
        if contract is not None:
            asked.append("--enable-deterministic-inference")
        if target is not None:
            asked += ["--rl-on-policy-target", target]
        environment = _environment(contract, order, pool, ranks, target)
        self._serve(checkpoint, server.interpreter(self.name), asked, environment, contract is not None)
        if contract is not None:
            self._server.check_pinned()

    def _serve(
        self, checkpoint: Path, python: Path, arguments: Sequence[str], environment: Mapping[str, str], seeded: bool
    ) -> None:
        """Start the server and wait for it; where `seeded`, each request carries a seed for its sampling."""
        self._seeded = seeded
        self._last_id = text_of(json.loads((checkpoint / "config.json").read_text()))["vocab_size"] - 1
        command = [str(python), "-m", "sglang.launch_server", *arguments, "--weight-version", "0"]
        self._server = server.started(self.name, command, environment, private=_private)

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        cut = [request.cut is not None for request in requests]
        prompts, more = [request.prompt for request in requests], {"return_sampling_mask": cut} if any(cut) else {}
        answers = self._generate(prompts, [*map(self._sampling, requests)], more, server.patience(requests))
        with reading("/generate", self.name):
            return [self._sample(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def _sampling(self, request: Request) -> dict[str, Any]:
        sampling: dict[str, Any] = {"temperature": request.temperature, "max_new_tokens": request.length}
        # With `ignore_eos` SGLang would ignore a stop token too.
        sampling |= {"ignore_eos": True} if request.end is None else {"stop_token_ids": [request.end]}
        if self._seeded:
            sampling["sampling_seed"] = request.seed
        if request.cut is not None:  # SGLang returns the kept tokens only where top-k is finite
            sampling |= {"top_p": request.cut.top_p, "top_k": request.cut.top_k or self._last_id + 1}
        return sampling

    def _sample(self, request: Request, answer: Any) -> Sample:
        meta = answer["meta_info"]
        check_counts(meta, len(request.prompt))
        tokens = tuple(whole(token, "token id", self._last_id) for token in answer["output_ids"])
        drawn, kept = _log_probs(meta["output_token_logprobs"], tokens), None
        if request.cut is not None:
            drawn, kept = _over_kept(meta, tokens)
        if not request.over(tokens):
            raise EngineError(f"sglang: {request.length} tokens asked, {len(tokens)} sampled")
        cached, retracted = (whole(meta[name], name) for name in ("cached_tokens", "num_retractions"))
        return Sample(request, tokens, drawn, int(meta["weight_version"]), cached, retracted, kept)

    def score(self, samples: Sequence[Sample]) -> list[Float32[Tensor, "_"]]:
        sampling = [{"temperature": 1.0, "max_new_tokens": 1} for _ in samples]
        answers = self._generate([sample.sequence for sample in samples], sampling, {"logprob_start_len": 0})
        with reading("/generate", self.name):
            return [self._score(sample, answer) for sample, answer in zip(samples, answers, strict=True)]

    def _score(self, sample: Sample, answer: Any) -> Float32[Tensor, "_"]:
        rows = list_of(answer["meta_info"]["input_token_logprobs"], len(sample.sequence), "log-probs of tokens")
        # This version reports the vocabulary's last id as 0.
        reported = [0 if token == self._last_id else token for token in sample.tokens]
        return _log_probs(rows[-len(sample.tokens) :], reported)

    def _generate(
        self, prompts: list, sampling: list, more: Mapping[str, Any], seconds: float = server.GENERATE_SECONDS
    ) -> Any:
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True, **more}
        return self._server.post("/generate", body, seconds)

    def update_weights(self, checkpoint: Path, version: int, keep_cache: bool = False) -> None:
        body = {"model_path": str(checkpoint), "flush_cache": False, "weight_version": str(version)}
        answer = self._server.post("/update_weights_from_disk", body)
        with reading("/update_weights_from_disk", self.name):
            if answer["success"] is not True:
                raise EngineError(f"refused the weights of {checkpoint}: {answer['message']}")
        if not keep_cache:
            # For a moment after its answer a request counts as running. An update that flushes fails then; this waits.
            self._server.get(f"/flush_cache?timeout={server.GENERATE_SECONDS}", 2 * server.GENERATE_SECONDS)

    def weights_checker(self, body: Mapping[str, Any]) -> Any:
        """Ask the server's weight checker, which returns digests by our plugin."""
        return self._server.post("/weights_checker", body)


def common_arguments(checkpoint: Path, dtype: str, pool: Pool) -> list[str]:
    """List the server's arguments that do not depend on the machine."""
    # Without --sleep-on-idle an idle scheduler keeps a core busy.
    flags = ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"]
    return flags + server.named(
        {
            "model-path": checkpoint,
            "dtype": server.DTYPES[dtype],
            "sampling-backend": "pytorch",
            "grammar-backend": "none",
            "max-total-tokens": pool.cached_tokens,
            "max-running-requests": pool.running,
            "chunked-prefill-size": pool.prefill_chunk or -1,
            "host": "127.0.0.1",
            "log-level": "info",
        }
    )


def _private(folder: Path, key: str) -> tuple[list[str], dict[str, str]]:
    """Name SGLang a file with its key, and one over which its ranks meet: torch's store would listen to the network."""
    file = folder / "key.yaml"
    file.write_text(f"api-key: {key}\n")
    return ["--config", str(file)], {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder}/ranks"}


def _environment(
    contract: Contract | None, order: NormOrder | None, pool: Pool, ranks: int, target: Target | None
) -> dict[str, str]:
    stand_in = str(server.HERE / "sglang" / "stand_in")
    added = {"PYTHONPATH": stand_in, "SGLANG_USE_CPU_ENGINE": "1", ASKED: "1", FORKS: "1"}
    if ranks > 1:  # unset, SGLang refuses more ranks than NUMA nodes; set, it binds no thread here
        added["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    if target is not None:  # SGLang's CPU path would round cos and sin to bf16, its GPU path does not
        added["SGLANG_ROPE_CACHE_FP32"] = "1"
    if pool.retract_every is not None:
        added |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(pool.retract_every)}
    return server.inherited() | added | handed_over(contract, order)


def _log_probs(rows: Sequence[Sequence[Any]], tokens: Sequence[int]) -> Float32[Tensor, "N"]:
    """Read the log-probs of `tokens` from rows (log-prob, token id, text)."""
    if [row[1] for row in rows] != list(tokens) or any(row[0] is None for row in rows):
        raise EngineError(f"sglang: log-probs of other tokens than were asked, or none: {rows[:3]} for {tokens[:3]}")
    return sglang_rows(rows)[1]


def _over_kept(
    meta: Mapping[str, Any], tokens: Sequence[int]
) -> tuple[Float32[Tensor, "N"], tuple[tuple[int, ...], ...]]:
    """Read the set of tokens that each token was sampled from, and the token's log-prob within its set.

    SGLang's ordinary log-probs are over the whole vocabulary.
    """
    kept = tuple(map(tuple, meta["output_token_sampling_mask"]))
    if {*map(type, chain.from_iterable(kept))} - {int}:
        raise EngineError(f"sglang: expected the ids of kept sets; got {short(kept)}")
    if len(kept) != len(tokens) or any(token not in row for token, row in zip(tokens, kept, strict=True)):
        raise EngineError(f"sglang: kept sets {kept[:3]} that are not those of the sampled tokens {tokens[:3]}")
    values = list_of(meta["output_token_sampling_logprobs"], len(tokens), "log-probs of tokens")
    return log_probs(values), kept
