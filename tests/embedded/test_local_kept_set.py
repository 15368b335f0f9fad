"""Top-p and top-k in the embedded host: both sides renormalize over the same tokens, on every layout of ranks."""

import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_local_loop import LOSS_HOOK
from test_local_parallel import RTOL, Grid, assert_same_run, relative, tis, train
from test_local_parallel import settings as grid_settings
from tolerances import FP32_LOG_PROB

from lab.host.cli.arguments import parse_args
from lab.host.model.engine import Generation
from lab.host.rollout.rollout_engines import cut_of
from lab.host.rollout.sample import Sample, make_samples
from lab.host.rollout.sampler import Rollout
from lab.host.rollout.served import _until
from lab.host.rollout.tasks import Problem, Task
from lab.host.train import parallel
from lab.host.train.batch import pack
from lab.host.train.log_probs import KeptSets, get_log_probs_and_entropy, kept_columns, response_log_probs
from mis_plugins.errors import InputError
from true_on_policy.engines import protocol
from true_on_policy.engines.protocol import Cut, EngineError, Request
from true_on_policy.engines.sglang.engine import _over_kept

VOCABULARY, LENGTHS = 12, [(9, 4), (5, 2), (7, 6)]  # of each sequence and its response
ARGS = Namespace(rollout_temperature=0.7, true_on_policy=False)


class Sequences:
    """Logits of every place, tokens, and kept sets of every response token, some without that token."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = [torch.randint(VOCABULARY, (total,), generator=generator) for total, _ in LENGTHS]
        self.logits = [torch.randn(total, VOCABULARY, generator=generator) for total, _ in LENGTHS]
        self.rows = [
            [torch.randperm(VOCABULARY, generator=generator)[: 1 + (t + i) % 5].tolist() for t in range(response)]
            for i, (_, response) in enumerate(LENGTHS)
        ]
        self.kept = [KeptSets(*map(torch.tensor, flat(rows))) for rows in self.rows]

    def expected(self) -> tuple[list[float], list[torch.Tensor]]:
        """The log-prob of every response token in float64, and its derivative by the logits of its place."""
        values, slopes = [], []
        for (total, response), tokens, logits, rows in zip(LENGTHS, self.tokens, self.logits, self.rows, strict=True):
            for t, row in enumerate(rows):
                place = total - response + t
                scaled = [x / ARGS.rollout_temperature for x in logits[place - 1].tolist()]
                token = int(tokens[place])
                mass = {i: math.exp(scaled[i]) for i in {*row, token}}
                values.append(scaled[token] - math.log(math.fsum(mass.values())))
                slope = [float(i == token) - mass.get(i, 0.0) / math.fsum(mass.values()) for i in range(VOCABULARY)]
                slopes.append(torch.tensor(slope) / ARGS.rollout_temperature)
        return values, slopes


def flat(rows: list[list[int]]) -> tuple[list[int], list[int]]:
    return sum(rows, []), [sum(map(len, rows[:i])) for i in range(len(rows) + 1)]


@pytest.mark.parametrize("tp, cp", [(1, 1), (2, 2)])
def test_log_probs_and_gradient_are_those_of_the_kept_sets(tp: int, cp: int) -> None:
    """On shards of the vocabulary and on parts of sequences; the helper of custom losses gives the same."""
    given = Sequences()
    values, slopes = given.expected()

    def main() -> None:
        state = parallel.initialize(tp, cp)
        layout = pack(given.tokens, [response for _, response in LENGTHS], state.cp.rank, state.cp.size)
        shard = slice(state.tp.rank * VOCABULARY // tp, (state.tp.rank + 1) * VOCABULARY // tp)
        slots = zip(layout.sequence.tolist(), layout.positions.tolist(), strict=True)
        rows = [given.logits[i][min(place, LENGTHS[i][0] - 1), shard] for i, place in slots]
        logits = torch.stack(rows)[None].requires_grad_()
        found = response_log_probs(logits, layout, ARGS, given.kept)
        mine = layout.response_index.tolist()
        expected = torch.tensor([values[i] for i in mine])
        torch.testing.assert_close(found, expected, rtol=0, atol=FP32_LOG_PROB)
        (gradient,) = torch.autograd.grad(found.sum(), logits)
        right = torch.zeros_like(logits[0])
        right[layout.scored] = torch.stack([slopes[i] for i in mine])[:, shard]
        torch.testing.assert_close(gradient[0], right, rtol=0, atol=FP32_LOG_PROB)
        asked = get_log_probs_and_entropy(
            logits,
            args=ARGS,
            unconcat_tokens=given.tokens,
            total_lengths=layout.total_lengths,
            response_lengths=layout.response_lengths,
            top_p_token_ids=[sets.ids for sets in given.kept],
            top_p_token_offsets=[sets.offsets for sets in given.kept],
        )
        assert torch.equal(torch.cat(asked["log_probs"]), found)

    assert parallel.launch(tp * cp, main) == 0


def test_kept_sets_of_another_count_are_named() -> None:
    given = Sequences()
    layout = pack(given.tokens, [response for _, response in LENGTHS])
    broken = replace(given.kept[1], offsets=given.kept[1].offsets[:-1])
    with pytest.raises(InputError, match="offsets of sample 1: 1 kept sets for 2 response tokens"):
        kept_columns(layout, [given.kept[0], broken, given.kept[2]], 0, VOCABULARY)


@pytest.fixture(scope="module")
def cut(recorded: Rollout) -> Rollout:
    """The recorded rollout as if each token had been sampled from itself and two thirds of the others."""
    samples, size = [], Task(2).vocab_size
    for sample in recorded.samples:
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        rows = [[i for i in range(size) if i == token or (i + t) % 3] for t, token in enumerate(response)]
        ids, offsets = flat(rows)
        samples.append(replace(sample, rollout_top_p_token_ids=ids, rollout_top_p_token_offsets=offsets))
    return replace(recorded, samples=samples)


def test_four_steps_over_kept_sets_agree_in_every_layout(cut: Rollout, recorded: Rollout, tmp_path: Path) -> None:
    """By the host's loss and by ours; without the sets the gradient would be another."""
    weight, grids = tis(tmp_path), (Grid(tp=2, cp=2), Grid(dp=2, cp=2))
    one = train(grid_settings(Grid(), weight), cut, tmp_path / "one")
    for grid in grids:
        assert_same_run(train(grid_settings(grid, weight), cut, tmp_path / f"dp{grid.dp}"), one)
    custom = train(grid_settings(grids[1], weight, LOSS_HOOK), cut, tmp_path / "custom", count=1)
    whole = train(grid_settings(Grid(), weight), recorded, tmp_path / "whole", count=1)
    assert relative(custom["steps"][0][1], one["steps"][0][1]) < RTOL
    assert relative(whole["steps"][0][1], one["steps"][0][1]) > 1000 * RTOL


def sample_of(rows: tuple[tuple[int, ...], ...] | None) -> protocol.Sample:
    return protocol.Sample(Request((1,), 3), (4, 9, 5), torch.tensor([-0.5, -0.25, -1.0]), 7, kept=rows)


def test_what_follows_the_end_of_a_response_is_cut_off_its_kept_sets() -> None:
    generation = _until(9, sample_of(((4, 2), (9,), (5,))))
    assert generation == Generation((4, 9), (-0.5, -0.25), 7, kept=((4, 2), (9,)))
    assert _until(9, sample_of(None)).kept is None
    task = Task(2)
    made: list[Sample] = make_samples(task, [Problem((1,), (4, 9))] * 2, [generation] * 2, 2)
    assert [one.rollout_top_p_token_ids for one in made] == [[4, 2, 9]] * 2
    assert [one.rollout_top_p_token_offsets for one in made] == [[0, 2, 3]] * 2


def test_sglangs_answer_is_read_or_refused() -> None:
    meta = {"output_token_sampling_mask": [[4, 2], [9]], "output_token_sampling_logprobs": [-0.5, 0.0]}
    log_probs, kept = _over_kept(meta, (2, 9))
    assert (log_probs.tolist(), kept) == ([-0.5, 0.0], ((4, 2), (9,)))
    for tokens in ((2, 8), (2,), (2, 9, 9)):
        with pytest.raises(EngineError, match="kept sets .* that are not those of the sampled tokens"):
            _over_kept(meta, tokens)


def test_both_flags_make_the_cut() -> None:
    asked = "--rollout-engine sglang --rollout-top-p 0.9 --rollout-top-k 5".split()
    assert cut_of(parse_args(asked)) == Cut(0.9, 5)
    assert cut_of(parse_args(asked[:4])) == Cut(0.9) and cut_of(parse_args([])) is None
