"""First on PYTHONPATH of a host that runs on a CPU: each Python process of the host installs the bends at its start."""

from lab.in_host import importing

importing.install()
