"""Messages about log-probs that were processed on one side only; loaded where `slope.py` finds them suspect."""

from collections.abc import Mapping

from mis_plugins.metrics import slope


def warnings_of(sums: Mapping[str, float]) -> list[str]:
    """Messages on the log-probs that `sums` add up. Where no line relates the log-probs, their means still tell."""
    related = slope.relation(sums)
    if related is not None:
        return warnings(related)
    return [_finds_unlikely(sums["usable"], slope.mean_log_ratio(sums))] if slope.means_unlikely(sums) else []


def _finds_unlikely(tokens: float, mean: float) -> str:
    return (
        f"the mean of log pi_old - log mu over {tokens:.0f} tokens is {mean:.2f}: the trainer finds what the rollout "
        "engine samples unlikely; compare weights, chat template and precision of both"
    )


def warnings(related: slope.Relation) -> list[str]:
    """Messages that tell what is wrong with the log-probs and what to check; none where both sides match."""
    raw = slope.not_sampled_from(related)
    mean = (
        f"the mean of pi_old / mu over {related.tokens:.0f} tokens is {related.mean_ratio:.4f} +- "
        f"{related.mean_ratio_error:.4f}, and should be 1: "
    )
    messages = []
    if slope.cut_off(related):
        messages.append(
            f"{mean}either the rollout engine alone samples from {related.mean_ratio:.1%} of the probability mass and "
            "renormalizes (check --rollout-top-p, --rollout-top-k and min-p, or hand the kept tokens to the trainer); "
            "or the trainer finds nearly every token less likely (compare weights, chat template and precision)"
        )
    if slope.unlikely(related):
        messages.append(_finds_unlikely(related.tokens, related.mean_log_ratio))
    if raw:
        messages.append(
            f"{mean}the tokens were not sampled from the log-probs that the rollout engine reports: check that it "
            "returns log-probs after the temperature, and of the weights that it sampled with"
        )
    if slope.scaled(related):
        whose = "the trainer's" if raw else "the rollout engine's"
        temperature = 1 / related.implied_temperature if raw else related.implied_temperature
        messages.append(
            f"log pi_old follows log mu with a slope of {related.slope:.3f} +- {related.slope_error:.3f} (inverse "
            f"regression: {related.inverse:.3f}), as if {whose} log-probs alone were divided by a temperature of "
            f"{temperature:.2f} or one further from 1: check --rollout-temperature on both sides, and whether "
            "log-probs are raw or processed"
        )
    return messages
