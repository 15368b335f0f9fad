"""The entry point that installed environments hold: true_on_policy.engines.vllm.plugin has the plugin."""

from true_on_policy.engines.vllm.plugin import activate as activate
