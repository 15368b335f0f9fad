"""Which flags each parser of a host accepts: what a launch script may pass."""

from mis_plugins.hosts.arguments import flags

UNRELEASED = {"sglang": {"--sglang-true-on-policy-contract"}}  # of the SGLang that Miles builds for itself


def accepted(*parsers: str) -> set[str]:
    return {flag for parser in parsers for flag in flags(parser) | UNRELEASED.get(parser, set())}
