"""vLLM's workers, asked for our digests: what `/collective_rpc` answers with our plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from true_on_policy.engines.digests import told

PATH, METHOD = "/collective_rpc", "true_on_policy_weights"  # a method of each worker
TARGET = "vllm.v1.worker.worker_base:WorkerBase"  # 0.32.0


def answered(worker: Any, action: str, names: Sequence[str]) -> dict[str, Any]:
    """Answer one of our two actions for the parameters of one worker, in the form of SGLang's checksum.

    A weight that vLLM has packed for a CPU's kernels, and emptied, is told with the dtype `packed_bfloat16`.
    """
    held = dict(worker.get_model().named_parameters(remove_duplicate=False))
    texts = told(held, action, names)
    sizes, tensor = worker.parallel_config, worker.parallel_config.tensor_parallel_size
    place = {"tp_rank": worker.rank % tensor, "tp_size": tensor, "pp_size": sizes.pipeline_parallel_size,
             "dp_size": sizes.data_parallel_size}  # fmt: skip
    checksums = {name: text if held[name].numel() else f"packed_{text}" for name, text in texts.items()}
    return {"checksums": checksums, "parallelism_info": [place]}


def request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Put a request for SGLang's weight checker into the form that vLLM's `/collective_rpc` takes."""
    return {"method": METHOD, "kwargs": {"action": body["action"], "names": body.get("skip_tensor_list", [])}}


def answer_as_sglang(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Put vLLM's answer, one entry a worker, into the form of SGLang's weight checker."""
    return {"ranks": answer["results"]}
