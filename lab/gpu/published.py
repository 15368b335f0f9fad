"""The costs of batch-invariant kernels that others publish, to lay beside ours; they were read, not measured."""

from __future__ import annotations

from lab.gpu.results import Result

PUBLISHED = Result(
    "Cost: published by others",
    ("who", "of what", "times stock", "where"),
    (
        (
            "torchtitan",
            "compute of RL with bitwise parity",
            "2.4 to 2.9",
            "experiments/rl/docs/bitwise_parity.md",
        ),
        (
            *("vLLM and torchtitan", "an RL run of Qwen3 1.7B", "2.4"),
            "vLLM blog, 2025-11-10, bitwise-consistent-train-inference",
        ),
        (
            *("SGLang", "deterministic inference with CUDA graphs", "1.34"),
            "lmsys.org/blog/2025-09-22-sglang-deterministic",
        ),
        (
            *("Thinking Machines, as SGLang quotes them", "deterministic inference", "1.62"),
            "lmsys.org/blog/2025-09-22-sglang-deterministic",
        ),
    ),
    note="Whole runs, other models and other machines: orders of magnitude, no goals.",
)
