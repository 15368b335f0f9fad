"""The embedded host: a small, real RL run on CPU that loads hooks as Miles and slime do.

`python -m lab.host --help`
"""

import warnings

# Megatron notices the lack of Transformer Engine and Apex, which need a GPU, in one warning a module.
warnings.filterwarnings("ignore", module=r"megatron\.")
# torch 2.13 renames a collective that older torch knows by this name alone.
warnings.filterwarnings("ignore", message=r".*all_gather_into_tensor", category=FutureWarning)

from lab.host.adapter import HOST  # noqa: E402
from mis_plugins.hosts.registry import register  # noqa: E402

register(HOST)
