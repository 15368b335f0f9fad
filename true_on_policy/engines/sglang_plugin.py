"""The entry points that installed environments hold: true_on_policy.engines.sglang.plugin has the plugin."""

from true_on_policy.engines.sglang.plugin import activate as activate
from true_on_policy.engines.sglang.plugin import allow as allow
