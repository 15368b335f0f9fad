"""slime's own generation, call by call: an update ends every call, and the host continues the response in another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mis_plugins.errors import InputError
from mis_plugins.hosts.needs.slime import SLIME
from mis_plugins.hosts.versions.numbering import FAULT, NUMBER, VERSIONS
from mis_plugins.hosts.versions.rollouts import NUMBERING
from mis_plugins.versions.response import spans


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool) -> Any:
    """Generate, or continue, one response as the host does, and add to the sample who wrote the new tokens."""
    own = SLIME.generation.get()
    if evaluation:
        return await own(args, sample, sampling_params)
    before = sample.response_length
    with heard(sample) as answers:
        await own(args, sample, sampling_params)
    if answers and sample.response_length > before:
        try:
            name_versions(sample, before, answers[-1])
        except InputError as error:
            # The conversion raises it later: slime only logs an error raised here, and waits for the group
            # for ever.
            setattr(sample, FAULT, str(error))
    return sample


@contextmanager
def heard(sample: Any) -> Iterator[list[Mapping[str, Any]]]:
    """Collect the engine's `meta_info` of each answer, which the host hands to the sample alone."""
    answers: list[Mapping[str, Any]] = []
    append = sample.append_response_tokens

    def listening(*given: Any, **named: Any) -> Any:
        answers.append(named["meta_info"])
        return append(*given, **named)

    sample.append_response_tokens = listening
    try:
        yield answers
    finally:
        del sample.append_response_tokens


def name_versions(sample: Any, before: int, meta_info: Mapping[str, Any]) -> None:
    """Write on the sample, and tell the shelf, which version wrote each token from `before` on."""
    runs = spans(meta_info, sample.response_length - before)
    earlier = getattr(sample, VERSIONS, []) if before else []
    versions = [*earlier, *(version for version, start, stop in runs for _ in range(start, stop))]
    start = len(sample.tokens) - sample.response_length
    if not before or not NUMBERING.known(sample):
        NUMBERING.begin(sample, sample.tokens[:start])
    setattr(sample, VERSIONS, versions)
    if len(versions) == sample.response_length:  # else the conversion refuses the sample
        NUMBERING.shelf.say(getattr(sample, NUMBER), 0, sample.tokens[start:], versions)
