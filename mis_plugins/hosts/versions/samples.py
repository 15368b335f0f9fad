"""What our hooks leave on a sample in the process of the rollouts, and what travels from there to the trainer.

The trainer also logs which share of a rollout's samples had requests that the engine retracted. SGLang retracts a
request to free its cache, or for an update of weights (`--pause-generation-mode retract`). It then computes the tokens
so far anew, and keeps their log-probs of the first pass. The routes of experts that it returns are those of the second
pass (miles#3277).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mis_plugins.config import reading
from mis_plugins.config.model import SegmentWiseConfig
from mis_plugins.errors import ConfigError, InputError, logger
from mis_plugins.hosts import uncorrected
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.needs import LOGLINEAR
from mis_plugins.hosts.registry import current
from mis_plugins.hosts.versions.heads import HEAD
from mis_plugins.hosts.versions.kept import KEPT
from mis_plugins.versions.spans import from_run_lengths, run_lengths

# Attributes that our generate functions leave on a sample: FAULT where its versions cannot be known, and in RETRACTIONS
# how often its requests were retracted.
NUMBER, VERSIONS, FAULT = "response_number", "output_versions", "versions_fault"
RETRACTIONS = "output_retractions"
RETRACTED = "retracted_fraction"
ROUTES = (
    "; --use-rollout-routing-replay replays the routes of the last pass beside log-probs of the first: give the engine "
    "more cache or fewer requests at once, or pause by abort"
)
GENERATE = "--custom-generate-function-path mis_plugins.mis.generate_with_versions"


def served(args: Any, flag: str) -> Host:
    """The host that runs, for the hook of a flag: a host on which versions are carried."""
    host = current(args)
    if not host.version_flags:
        raise ConfigError(f"{flag}: versions are not carried on {host.title}; leave the flag out")
    return host


def segment_wise(args: Any) -> SegmentWiseConfig | None:
    """Segment-wise weights as the loss hook will have them; None where they are off, or the TIS hook weighs."""
    if getattr(args, "loss_type", None) != "custom_loss":
        return None
    config = reading.from_args(args)
    with suppress(ConfigError):  # the loss hook itself refuses a file that this worker cannot read
        config = uncorrected.for_loss_hook(args, config)
    config = config.where_versions_are_known()
    return config.segment_wise if config.segment_wise_on else None


def recomputes(config: SegmentWiseConfig | None) -> bool:
    """Whether weights read log-probs that a recompute stored."""
    return config is not None and config.method == "recompute"


@dataclass(frozen=True)
class Note:
    """What travels to the trainer beside a sample: its batch and number on the shelf, and who wrote its tokens.

    more: what else the engine said of the tokens, in bytes by name (`heads.py`, `kept.py`), and numbers of the batch.
    """

    batch: int
    number: int
    versions: Sequence[int]
    more: Mapping[str, Any] = field(default_factory=dict)

    def packed(self) -> list[Any]:
        """Batch, number, version and count of each run of tokens that one version wrote, and what else there is."""
        more = [dict(self.more)] if self.more else []
        return [self.batch, self.number, *run_lengths(self.versions), *more]

    @classmethod
    def of(cls, packed: Any, key: str) -> "Note":
        """Read what `packed` wrote."""
        written = list(packed) if isinstance(packed, Sequence) else []
        more = written[-1] if written and isinstance(written[-1], Mapping) else {}
        numbers = written[:-1] if more else written
        if len(numbers) < 2 or len(numbers) % 2 or not all(isinstance(x, int) for x in numbers):
            raise InputError(
                f"{key}: not those of mis_plugins; give --custom-convert-samples-to-train-data-path "
                "mis_plugins.mis.convert_with_versions"
            )
        return cls(numbers[0], numbers[1], from_run_lengths(numbers[2:]), more)


SAID = (HEAD, KEPT)  # attributes that hold what the engine said of each token, beside its version


def packed_columns(sample: Any) -> dict[str, bytes]:
    """What the engine said of the tokens of a sample, packed by name."""
    columns = (getattr(sample, name).packed() for name in SAID if hasattr(sample, name))
    return {name: packed for each in columns for name, packed in each.items()}


def check_sample(sample: Any, scored: bool, needed: Mapping[str, str]) -> None:
    """Refuse with an InputError a sample that has a fault, or lacks versions or an attribute that the trainer reads.

    `needed` holds for each attribute that the trainer reads who reads it.
    """
    if (fault := getattr(sample, FAULT, None)) is not None:
        raise InputError(f"sample {sample.index}: {fault}")
    versions = getattr(sample, VERSIONS, None)
    if versions is None or not hasattr(sample, NUMBER):
        raise InputError(f"sample {sample.index}: no {VERSIONS}; generate with {GENERATE}")
    for name, reader in needed.items():
        if not hasattr(sample, name):
            raise InputError(f"sample {sample.index}: no {name}, which {reader} reads; generate with {GENERATE}")
    columns = {name: getattr(sample, name) for name in (VERSIONS, *SAID) if hasattr(sample, name)}
    for name, of_tokens in columns.items():
        if len(of_tokens) != sample.response_length:
            raise InputError(
                f"sample {sample.index}: {name} of {len(of_tokens)} tokens, and the response has "
                f"{sample.response_length}; change responses before they are generated on, not after"
            )
    if scored and getattr(sample, "multimodal_train_inputs", None):
        raise InputError(
            f"sample {sample.index}: multimodal_train_inputs, and recompute would score its tokens without them; "
            f"{LOGLINEAR}"
        )


def hear_retractions(sample: Any, meta_info: Mapping[str, Any], before: int) -> None:
    """Add to the sample what the `meta_info` of an answer says, if its engine says anything.

    Args:
        before: how many tokens the response had before the answer; 0 begins to count anew.
    """
    retractions = meta_info.get("num_retractions")
    if retractions is not None:
        setattr(sample, RETRACTIONS, retractions + (getattr(sample, RETRACTIONS, 0) if before else 0))


def retracted_share(args: Any, samples: Sequence[Any]) -> dict[str, float]:
    """The share of the samples whose requests were retracted, by its name; empty where the engine does not say."""
    retractions = [getattr(sample, RETRACTIONS, None) for sample in samples]
    if None in retractions or not retractions:
        return {}
    retracted = sum(map(bool, retractions))
    if retracted:
        routes = ROUTES if getattr(args, "use_rollout_routing_replay", False) else ""
        logger.warning("the engine retracted the requests of %d of %d samples%s", retracted, len(retractions), routes)
    return {RETRACTED: retracted / len(retractions)}
