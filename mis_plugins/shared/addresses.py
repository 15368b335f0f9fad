"""Modules of earlier releases, and the module or command that took the place of each."""

from __future__ import annotations

TOYS = "collapse experts presets report_collapse truly_on_policy".split()
MOVED = {
    "mis_plugins.hooks": "lab.host.asynchronous.update_hooks",
    "mis_plugins.local": "lab.host",
    "mis_plugins.metric_docs": "lab.pages.metrics",
    "mis_plugins.offpolicyness": "lab.host.asynchronous.staleness_bound",
    "mis_plugins.recompute": "lab.host.asynchronous.pool",
    "mis_plugins.segmentwise": "mis_plugins.versions.segment_wise",
    "mis_plugins.config.docs": "lab.pages.presets",
    "mis_plugins.explain.docs": "lab.pages.kept",
    "mis_plugins.metrics.docs": "lab.pages.metrics",
    "mis_plugins.report.docs": "lab.pages.report",
    "mis_plugins.versions.staleness_bound": "lab.host.asynchronous.staleness_bound",
    "mis_plugins.versions.update_hooks": "lab.host.asynchronous.update_hooks",
    "true_on_policy.engines.sglang_plugin": "true_on_policy.engines.sglang.plugin",
    "true_on_policy.engines.vllm_plugin": "true_on_policy.engines.vllm.plugin",
    "true_on_policy.flags.cpu": "lab.in_host.cpu_launch",
    "true_on_policy.gpu_contract": "true_on_policy.contract.gpu",
    "true_on_policy.gpu_probes": "true_on_policy.kernels.gpu_probes",
    "true_on_policy.kernels.exhaustive": "lab.exhaustive",
    "true_on_policy.log_probs": "true_on_policy.diff.log_prob_record",
    "true_on_policy.pin": "true_on_policy.kernels.pin",
    "true_on_policy.recorder": "true_on_policy.diff.module_recorder",
    "true_on_policy.storage": "mis_plugins.shared.files",
    "true_on_policy.trainers.host_layers": "lab.in_host.layers",
    **{f"lab.{name}": f"python -m lab.toys {name}" for name in TOYS},
    "lab.asynchrony": "python -m lab.toys async",
}
"""What took the place of a module: a module, or a command."""
