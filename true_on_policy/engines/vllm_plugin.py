"""The entry point of environments installed earlier; true_on_policy.engines.vllm.plugin holds the plugin."""

from true_on_policy.engines.vllm.plugin import activate as activate
