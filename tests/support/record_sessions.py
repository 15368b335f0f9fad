"""Record the samples that Miles's own session code makes, in `recorded_sessions.json`.

    PYTHONPATH=CHECKOUT OUT=tests/support/recorded_sessions.json python tests/support/record_sessions.py

CHECKOUT is Miles 31f1ca961; the environment holds what it imports. An agent of two turns makes the first sample: its
turns are those of `rollout/session/samples/merge.py`, merged by `generate_utils/sample_utils.py`. Two more are leaves
of one rollout that share their first turn, trained once (`session/v2/postprocessor_hub/default_postprocess.py`), and a
fourth was aborted. All but that cross the wire by `samples/codec.py`. Token ids are below 8.
"""

import json
import os
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from miles.rollout.generate_utils.sample_utils import merge_samples  # pyright: ignore[reportMissingImports]
from miles.rollout.session.samples import codec  # pyright: ignore[reportMissingImports]
from miles.rollout.session.samples.merge import compute_samples_from_openai_records  # pyright: ignore[reportMissingImports]
from miles.rollout.session.types import SessionRecord  # pyright: ignore[reportMissingImports]
from miles.rollout.session.v2.postprocessor_hub.default_postprocess import default_postprocess  # pyright: ignore[reportMissingImports]
from miles.utils.types import Sample  # pyright: ignore[reportMissingImports]

ARGS = SimpleNamespace(save_debug_trajectory_data=None, sglang_speculative_algorithm=None)
TOKENIZER = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
FIELDS = ("tokens", "response_length", "loss_mask", "rollout_log_probs", "weight_versions", "index", "rollout_id",
          "group_index", "remove_sample", "metadata")  # fmt: skip


def record(prompt: list[int], *answer: tuple[float, int]) -> SessionRecord:
    """A turn: the tokens that the engine was given, and (log-prob, token) of those that it sampled, under version 7."""
    meta = {"output_token_logprobs": list(answer), "weight_version": "7"}
    choice = {"message": {"role": "assistant", "content": "a"}, "finish_reason": "stop", "meta_info": meta}
    return SessionRecord(timestamp=0.0, method="POST", path="/v1/chat/completions", status_code=200,
                         request={"messages": [], "input_ids": prompt}, response={"choices": [choice]})  # fmt: skip


def answered(turn: SessionRecord) -> list[tuple[float, int]]:
    return turn.response["choices"][0]["meta_info"]["output_token_logprobs"]


def session(*records: SessionRecord) -> Sample:
    last = records[-1]
    tokens = last.request["input_ids"] + [token for _, token in answered(last)]
    turns = compute_samples_from_openai_records(ARGS, list(records), TOKENIZER, tokens)
    return merge_samples(turns, TOKENIZER)


def leaf(number: int, path: list[int], *records: SessionRecord) -> Sample:
    made = session(*records)
    made.metadata["leaf"] = {"node_id": number, "path_node_ids": path}
    return made


first = record([7, 1], (-2.0, 0), (-1.5, 3), (-1.0, 5))
tool = [7, 1, 0, 3, 5, 6, 6]  # two tokens of a tool behind the first answer
alone = session(first, record(tool, (-0.5, 2), (-3.0, 4)))
nodes = [{"id": i, "completion_span": span} for i, span in enumerate(([2, 5], [8, 9], [7, 9]))]
second, third = record([*tool, 1], (-1.25, 7)), record(tool, (-0.75, 1), (-2.5, 6))
leaves = default_postprocess(
    [leaf(1, [0, 1], first, second), leaf(2, [0, 2], first, third)], {"tree": {"nodes": nodes}, "agent": {}}
)


def crossed(made: list[Sample], index: int) -> list[Sample]:
    """The samples as the process of the rollouts decodes them, which gives siblings the number of their rollout."""
    given = Sample(index=index, group_index=0)
    got = codec.decode_samples_and_merge_input_sample(codec.encode_samples(made, {}), given).samples
    for one in got if len(got) > 1 else ():
        one.rollout_id = index
    return got


aborted = deepcopy(Sample(index=2, group_index=0, status=Sample.Status.ABORTED))
samples: list[Any] = [*crossed([alone], 0), *crossed(leaves, 1), aborted]
rows = [{name: getattr(one, name) for name in FIELDS} for one in samples]
Path(os.environ["OUT"]).write_text(json.dumps(rows, indent=1, default=list) + "\n")
