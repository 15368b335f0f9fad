"""Serve `mis_plugins.metrics.docs` at an address that scripts of users import."""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("mis_plugins.former.metric_docs:main")

from mis_plugins.metrics.docs import main as main
