"""Metadata and extras. Imports nothing of the package: the version is read as text."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """The string assigned to `__version__` in `mis_plugins/__init__.py`."""
    source = (ROOT / "mis_plugins" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if found is None:
        raise RuntimeError('mis_plugins/__init__.py: no line that reads __version__ = "..."')
    return found.group(1)


# The first page on a package index: it links to nothing, because no address of the project is published.
FIRST_PAGE = """# mis-plugins

For people who train language models with RL on Miles or slime. SGLang samples, Megatron or FSDP trains, and for the
same tokens and weights they give different log-probs. This pack corrects the mismatch by importance weights and
rejection, or removes it: equal kernels on both sides, compared bit by bit (on a GPU: one H100, no host).

```bash
pip install 'mis-plugins[scripts]'            # keeps the torch that is there
mis-plugins config check YOUR_LAUNCH_SCRIPT   # says what your launch lacks, and changes nothing
```
"""

setup(
    name="mis-plugins",
    version=version(),
    description="Corrects the train-inference mismatch of RL training: importance weights, rejection, diagnostics",
    long_description=FIRST_PAGE,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    packages=[
        *find_namespace_packages(include=["mis_plugins*", "true_on_policy*"], exclude=["*.__pycache__"]),
        "mis_plugins.presets",
    ],
    # yaml/ holds no code and has no __init__.py (it would shadow PyYAML); a wheel carries it inside the package.
    package_dir={"mis_plugins.presets": "yaml"},
    package_data={
        "mis_plugins": ["py.typed"],
        "mis_plugins.explain": ["rungs.json"],
        "mis_plugins.hosts": ["records/*.txt"],
        "mis_plugins.report": ["*.yaml", "page.css", "page.html"],
        "mis_plugins.shared": ["moved.yaml"],
        "mis_plugins.presets": ["*.yaml", "peers/*.yaml"],
        "true_on_policy.contract": ["*.yaml"],
        "true_on_policy.diff": ["*.yaml"],
        "true_on_policy.engines": ["*.sh", "*/packages.txt"],
        "true_on_policy.kernels": ["*.c"],
        "true_on_policy.models": ["*.yaml"],
        "true_on_policy.trainers": ["*.yaml"],
        "true_on_policy.verify": ["*.txt"],
    },
    # No bounds here: a host brings its own torch, and installing us must never replace it.
    install_requires=["torch", "pyyaml", "jaxtyping"],
    extras_require={
        "docs": ["zensical", "mkdocstrings[python]", "latex2mathml"],  # the site: bash scripts/docs.sh
        "report": ["numpy", "safetensors", "rich", "matplotlib", "pyarrow", "tokenizers"],
        "scripts": ["tree-sitter>=0.26.1", "tree-sitter-bash"],  # launch scripts: `config check`, and the translators
        "gpu": ["transformer-engine[pytorch]; platform_system == 'Linux'"],  # Apex is from source: docs/gpu.md
        "verify": [
            "megatron-core==0.16.*",
            "numpy",
            "safetensors",
            "transformers",
            "rich",
            "matplotlib",
            "gguf",
            "tokenizers",
        ],
        "dev": [
            "pytest",
            "pytest-xdist",
            "pytest-timeout",
            "hypothesis",
            "atheris; platform_system == 'Linux' and platform_machine == 'x86_64'",  # lab/break_it/guided.py
            "beartype",
            "safetensors",
            "pyarrow",
            "pydantic",  # arguments of a newer Miles, in tests
            "playwright",  # drives a Chromium that is installed, in the tests of the report's page
            "latex2mathml",
            "ruff",
            "build",  # scripts/release.sh
            "setuptools>=77",
            "readme_renderer[md]",  # renders the first page as a package index does
            "pyright[nodejs]",
            "tree-sitter>=0.26.1",
            "tree-sitter-bash",
            "triton; platform_system == 'Linux'",  # interprets Megatron-core's kernels on CPU
        ],
    },
    # An engine loads its own in each of its processes; it does nothing unless our launcher asks
    # (TRUE_ON_POLICY_CONTRACT).
    entry_points={
        "console_scripts": [
            "mis-plugins = mis_plugins.shared.shell:mis_plugins_command",
            "true-on-policy = mis_plugins.shared.shell:true_on_policy_command",
        ],
        "sglang.srt.plugins": ["true_on_policy = true_on_policy.engines.sglang.plugin:activate"],
        # Loaded before SGLang resolves its arguments, for a host that starts the server by itself; names no platform.
        "sglang.srt.platforms": ["true_on_policy = true_on_policy.engines.sglang.plugin:allow"],
        "vllm.general_plugins": ["true_on_policy = true_on_policy.engines.vllm.plugin:activate"],
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
