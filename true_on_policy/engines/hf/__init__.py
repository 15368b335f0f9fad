"""Hugging Face transformers as a rollout engine of this process: its record and its decoding."""

from true_on_policy.contract.specs import HUGGING_FACE, EngineSpec, at

ENGINE = EngineSpec(
    start=at("true_on_policy.engines.hf.engine:start"), order=HUGGING_FACE, packages=("torch", "transformers")
)
