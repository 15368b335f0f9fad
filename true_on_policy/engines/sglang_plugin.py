"""Entry points of environments installed earlier; true_on_policy.engines.sglang.plugin holds the plugin."""

from true_on_policy.engines.sglang.plugin import activate as activate
from true_on_policy.engines.sglang.plugin import allow as allow
