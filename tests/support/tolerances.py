"""Every tolerance of the tests. Each follows from float32 and the size of the numbers; none is tuned.

`EPS` is the spacing of float32 at 1: a rounded operation is off by at most EPS / 2 of its result.
"""

import torch

EPS = torch.finfo(torch.float32).eps

# A decision is compared exactly, so batches keep every statistic this far (in log units) from every bound:
# a thousand times the rounding of a log ratio near 1, far below the gaps that matter to a user.
DECISION = 1000 * EPS

# exp, one product and one division after the log ratio: each at most one EPS (torch's exp is good to 1 ulp).
FEW_OPERATIONS = 4


def weight_rtol(total_abs_log_ratio: float) -> float:
    """Relative error of exp(sum of log ratios).

    Each subtraction proximal - behavior rounds by EPS / 2 of its result, the sum once more; exp turns the absolute
    error of its argument into a relative one.
    """
    return EPS * (total_abs_log_ratio + FEW_OPERATIONS)


def normalized_rtol(largest_total_abs_log_ratio: float) -> float:
    """A weight over a mean of positive weights: a mean of positive numbers is no worse than its worst term."""
    return 2 * weight_rtol(largest_total_abs_log_ratio)


def metric_atol(total_abs_log_ratio: float, largest_abs_log_prob: float, tokens: int, value: float) -> float:
    """Error of a metric: the worst is exp(2 x sum) - 1, or exp(mean log-prob) with `tokens` float32 additions.

    The exponential doubles the relative error of a weight; the subtraction of 1 makes it absolute at scale 1.
    """
    amplification = total_abs_log_ratio + largest_abs_log_prob * (1 + tokens) + FEW_OPERATIONS
    return 2 * EPS * amplification * max(1.0, abs(value))


def sum_rtol(terms: int) -> float:
    """A float32 sum of `terms` numbers of one sign, in any order."""
    return EPS * terms


# Log-probs of one small model by two float32 implementations: logits near 8, a few dozen roundings deep.
FP32_LOG_PROB = 80 * EPS

# The same with bfloat16 logits near 8, each rounded to a multiple of 1/32: one step up in one, one down in the other.
BF16_LOG_PROB = 2 / 32

# The spacing of float64, in which what a step adds up to is kept.
EPS64 = torch.finfo(torch.float64).eps

# The step of a central difference in float64 that balances what it truncates, step^2 x f''' / 6, and what it cancels,
# EPS / step x f: both are about step^2.
FINITE_STEP = torch.finfo(torch.float64).eps ** (1 / 3)


def finite_difference_atol(magnitude: float) -> float:
    """Error of a central difference of sums of exponentials whose terms add up to `magnitude` in absolute value."""
    return 2 * FINITE_STEP**2 * magnitude


def float64_atol(magnitude: float, terms: int) -> float:
    """A float64 sum of `terms` numbers, each a few operations deep, that add up to `magnitude` in absolute value."""
    return torch.finfo(torch.float64).eps * (terms + 2 * FEW_OPERATIONS) * magnitude


# The largest exponent in size, and an exp turns an absolute error of its argument into a relative one.
EXPONENT = 64


def step_atol(terms: int, size: float) -> float:
    """A float64 mean of `terms` numbers of at most `size`, each an exp or two and a few products old."""
    return EPS64 * (terms + 2 * EXPONENT) * size


def step_weight_atol(terms: int, size: float) -> float:
    """The same of float32 numbers: weights, and what rules compare."""
    return EPS * (terms + 2 * EXPONENT) * size


# A few float32 numbers that a test writes down, exponentiated, against the formula that stands beside them: their
# logarithms are below 128, so that the argument of exp is off by 64 EPS at most.
WRITTEN = 128 * EPS


def product_atol(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | float = 0.0) -> torch.Tensor:
    """a @ b + 2 * bias, terms added in float32 in any order, rounded to the dtype of `a` at the end.

    Each of the K terms passes at most K roundings of EPS / 2; products, scalings and the last sum add a few.
    """
    size = a.double().abs() @ b.double().abs() + 2 * torch.as_tensor(bias).double().abs()
    return ((a.shape[-1] + 2 * FEW_OPERATIONS) * EPS + torch.finfo(a.dtype).eps) * size


def attention_atol(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> float:
    """An output is a mean of values: it moves by their size times the relative error of the weights.

    That is the absolute error of a score (a product, its scale and bias), twice (numerator and denominator), and one
    rounding a key of the sum. bfloat16 kernels round weights and outputs to their own dtype.
    """
    scores = product_atol(query.float(), key.float().mT).max() * query.shape[-1] ** -0.5
    scores = scores + FEW_OPERATIONS * EPS * bias[bias.isfinite()].abs().max()
    weights = 2 * scores + (key.shape[-2] + FEW_OPERATIONS) * EPS + 2 * torch.finfo(value.dtype).eps
    return float(weights * value.abs().max())


# Tensors that are rounded between an input and its gradient in the tests' layer: product, attention (4), activation,
# loss, and the same on the way back.
ROUNDED_TENSORS = 14


def gradient_rtol(dtype: torch.dtype) -> float:
    """Relative error of a gradient's norm after so many roundings, none of which an ill-conditioned step amplifies."""
    return ROUNDED_TENSORS * torch.finfo(dtype).eps
