"""SGLang as a rollout engine: its record, its server, our plugin inside its processes, and what the plugin observes."""

from true_on_policy.contract.specs import EngineSpec, NormOrder, at

ENGINE = EngineSpec(
    start=at("true_on_policy.engines.sglang.engine:start"),
    order=NormOrder(rounds_sum=False, rounds_normalized=False),
    packages=("sglang", "torch", "transformers"),
    splits=True,
    abilities=("prefix cache", "preemption"),
)
