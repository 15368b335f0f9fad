"""A generate function of two turns with a tool's answer between, for `--custom-generate-function-path` of either host.

One sample of each rollout hands its second turn on with another first token, as where a text is tokenized again.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from lab.in_host.reward import BROKEN, ROLLOUT
from mis_plugins.mis import turns_checked

TOOL = (65, 66, 67)
TURN = 8  # tokens


@cache
def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=True)


def _post(args: Any) -> Any:
    package = "miles" if "miles.utils.http_utils" in sys.modules else "slime"
    return sys.modules[f"{package}.utils.http_utils"].post


async def _dialogue(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Ask the engine twice, each time behind all tokens so far."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = list(_tokenizer(args.hf_checkpoint).encode(sample.prompt, add_special_tokens=False))
    prompt, mask, log_probs = len(sample.tokens), [], []
    for turn in range(2):
        asked = {"input_ids": list(sample.tokens), "return_logprob": True,
                 "sampling_params": {**sampling_params, "max_new_tokens": TURN, "ignore_eos": True}}  # fmt: skip
        meta = (await _post(args)(url, asked))["meta_info"]
        rows, tool = meta["output_token_logprobs"], () if turn else TOOL
        ids = [row[1] for row in rows]
        if turn and sample.index % ROLLOUT == BROKEN:
            ids[0] = (ids[0] + 1) % 128
        sample.tokens = [*sample.tokens, *ids, *tool]
        log_probs += [*(row[0] for row in rows), *(0.0 for _ in tool)]
        mask += [*(1 for _ in ids), *(0 for _ in tool)]
    sample.loss_mask, sample.rollout_log_probs = mask, log_probs
    sample.response_length, sample.response = len(sample.tokens) - prompt, "two turns"
    sample.status = type(sample).Status.COMPLETED
    return sample


generate = turns_checked(_dialogue)
