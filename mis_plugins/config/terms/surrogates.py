"""Policy losses, one value a token, each by the name that `mis.objective.surrogate` gives. A new one is a row here.

Loaded where a config has an objective, and by what explains one. The tensors' side is in `loss/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mis_plugins.errors import ConfigError

if TYPE_CHECKING:
    from mis_plugins.config.model import ObjectiveConfig


@dataclass(frozen=True)
class Surrogate:
    """One policy loss, with everything that the pack knows of it.

    formula: the loss of a kept token; s_t is the ratio of pi_theta to `old`, w_t the weight.
    words: the loss for a reader, with `{ratio}` and the names of its settings.
    lines: further lines of the formula, with `{old}`, `{ratio}` and the names of its settings. The loss is 0 where a
        line defines `away_t` and it holds.
    of_token: why the ratio is of a token, whatever `ratio` says; None where `ratio: sequence` has a meaning.
    of_sequence: how the surrogate makes one number of a sequence itself; None where it does not.
    settings: the keys of `mis.objective` that are its own, with their defaults.
    """

    formula: str
    words: str
    lines: tuple[str, ...] = ()
    of_token: str | None = None
    of_sequence: str | None = None
    settings: Mapping[str, float] = field(default_factory=dict)


_AWAY = "away_t = (A_t > 0 and pi_theta > {old} and D_t > eps_high) or (A_t < 0 and pi_theta < {old} and D_t > eps)"
_BEYOND = "away_t = pi_theta - {old} > eps_high or {old} - pi_theta > eps, of the sampled token"
_DPPO = (
    "DPPO, -A log pi_theta, with {{ratio}} (at most --eps-clip-c, or 20) as a constant factor, and 0 where A moved the "
    "token's probability {by} --eps-clip-high up, or --eps-clip down"
)
_CAPPED = "-w_t sg(min(s_t, c)) A_t log pi_theta(y_t)"
_OF_TOKEN = "divergence is of a token"

SURROGATES: dict[str, Surrogate] = {
    # PPO, GRPO, GSPO
    "clip": Surrogate(formula="-w_t min(s_t A_t, clip(s_t, 1 - eps, 1 + eps_high) A_t)", words="PPO's clip of {ratio}"),
    "reinforce": Surrogate(
        formula="-w_t A_t log pi_theta(y_t)", words="REINFORCE, -A log pi_theta, with the weight as a constant factor"
    ),
    "cispo": Surrogate(
        formula="-w_t sg(clip(s_t, 1 - eps, 1 + eps_high)) A_t log pi_theta(y_t)",
        words="CISPO, -A log pi_theta, with the clipped {ratio} as a constant factor",
    ),
    "dppo_tv": Surrogate(
        formula=_CAPPED,
        words=_DPPO.format(by="by more than"),
        lines=("D_t    = |pi_theta - {old}|, of the sampled token", _AWAY),
        of_token=_OF_TOKEN,
    ),
    "dppo_kl": Surrogate(
        formula=_CAPPED,
        words=_DPPO.format(by="by a binary KL of more than"),
        lines=(
            "D_t    = {old} * log({old} / pi_theta) + (1 - {old}) * log((1 - {old}) / (1 - pi_theta)), of the sampled "
            "token",
            _AWAY,
        ),
        of_token=_OF_TOKEN,
    ),
    "ipo": Surrogate(
        formula=_CAPPED,
        words=(
            "IPO, -A log pi_theta, with {ratio} (at most --eps-clip-c, or 20) as a constant factor; 0 where the "
            "token's probability moved by more than --eps-clip-high up, or --eps-clip down, whatever the sign of A"
        ),
        lines=(_BEYOND,),
        of_token=_OF_TOKEN,
    ),
    "sapo": Surrogate(
        formula="-w_t g_t A_t",
        words="SAPO, a soft gate of {ratio} in the place of PPO's clip, of temperature {tau_pos:g} where A is above 0, "
        "else {tau_neg:g}",
        lines=("g_t    = 4 / tau * sigmoid(tau * (s_t - 1)), tau = {tau_pos:g} where A_t > 0, else {tau_neg:g}",),
        settings={"tau_pos": 1.0, "tau_neg": 1.05},
    ),
    "vespo": Surrogate(
        formula="-w_t sg(phi_t) A_t log pi_theta(y_t)",
        words="VESPO, -A log pi_theta, with a soft weight of the product of {ratio} over the sequence as a constant "
        "factor; of power {k_pos:g} and decay {lambda_pos:g} where A is at least 0, else {k_neg:g} and {lambda_neg:g}",
        lines=(
            "s      = prod_t {ratio}",
            "phi_t  = e^lambda s^k e^(-lambda s), (k, lambda) = ({k_pos:g}, {lambda_pos:g}) where A_t >= 0, else "
            "({k_neg:g}, {lambda_neg:g})",
        ),
        of_sequence="weighs by the product over the sequence",
        settings={"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    ),
    "gmpo": Surrogate(
        formula="-s mean_t(w_t A_t)",
        words="GMPO, the geometric mean over the sequence of {ratio}, whose logarithm is clipped at --eps-clip-high "
        "where A is above 0, and at minus --eps-clip elsewhere",
        lines=(
            "c_t    = min({ratio}, e^eps_high) where A_t > 0, else max({ratio}, e^-eps)",
            "s      = (prod_t c_t)^(1/n)",
        ),
        of_sequence="has the geometric mean over the sequence of clipped ratios",
    ),
}
"""By the name that a config gives in `surrogate`."""

LEAST, MOST = 1e-6, 1e6  # of a surrogate's own settings: far beyond, loss and gradient leave float32
OWN_SETTINGS = {name: key for key, record in SURROGATES.items() for name in record.settings}
"""By each key that belongs to one surrogate alone: that surrogate."""


def check(objective: "ObjectiveConfig") -> dict[str, float]:
    """Check what an objective says, and return the defaults of the settings that it leaves out.

    Raises:
        ConfigError: settings that contradict each other, or that belong to another surrogate.
    """
    record, surrogate = SURROGATES[objective.surrogate], f"{{surrogate}}: {objective.surrogate}"
    if objective.surrogate == "reinforce" and objective.old == "proximal":
        raise ConfigError(
            f"{{old}}: proximal with {surrogate} leaves pi_theta / pi_old out of the gradient; use {{old}}: behavior"
        )
    _check_unit(objective, record, surrogate)
    for name, owner in OWN_SETTINGS.items():
        value = getattr(objective, name)
        if value is not None and owner != objective.surrogate:
            raise ConfigError(
                f"{{{name}}}: {value:g} is of {{surrogate}}: {owner}, beside {surrogate}; a config names one "
                "objective: drop one of them"
            )
        if value is not None and not LEAST <= value <= MOST:
            raise ConfigError(f"{{{name}}}: got {value:g}; give a number from {LEAST:g} to {MOST:g}")
    if not 0 <= objective.kl_tau <= MOST:
        raise ConfigError(f"{{kl_tau}}: got {objective.kl_tau:g}; give a number from 0 to {MOST:g}")
    return {name: value for name, value in record.settings.items() if getattr(objective, name) is None}


def _check_unit(objective: "ObjectiveConfig", record: Surrogate, surrogate: str) -> None:
    """Check `ratio`, and what needs the ratio of a token."""
    by_sequence = objective.ratio == "sequence"
    if by_sequence and objective.surrogate == "reinforce":
        raise ConfigError(f"{{ratio}}: sequence has no effect with {surrogate}")
    if by_sequence and record.of_token is not None:
        raise ConfigError(f"{{ratio}}: sequence contradicts {surrogate}, whose {record.of_token}; use token")
    if by_sequence and record.of_sequence is not None:
        raise ConfigError(f"{{ratio}}: sequence beside {surrogate}, which {record.of_sequence}; drop {{ratio}}")
    if objective.kl_tau and (by_sequence or record.of_sequence is not None):
        unit = "{ratio}: sequence" if by_sequence else surrogate
        raise ConfigError(
            f"{{kl_tau}}: {objective.kl_tau:g} penalizes the ratio of a token, and {unit} has none; drop {{kl_tau}}"
        )
