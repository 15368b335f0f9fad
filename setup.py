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


setup(
    name="mis-plugins",
    version=version(),
    description="Corrects the train-inference mismatch of RL training: importance weights, rejection, diagnostics",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
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
        "mis_plugins.hosts": ["records/*.txt"],
        "mis_plugins.presets": ["*.yaml", "peers/*.yaml"],
        "true_on_policy.engines": ["*.sh", "*.txt"],
        "true_on_policy.kernels": ["*.c"],
    },
    # No bounds: a host brings its own torch, and installing us must never replace it.
    install_requires=["torch", "pyyaml", "jaxtyping"],
    extras_require={
        "local": ["megatron-core==0.16.*", "numpy", "safetensors", "transformers", "rich", "matplotlib"],
        "report": ["rich", "matplotlib"],
        "gpu": [
            "transformer-engine[pytorch]; platform_system == 'Linux'"
        ],  # Apex is from source: docs/gpu.md
        "verify": ["megatron-core==0.16.*", "numpy", "safetensors", "transformers", "rich", "matplotlib"],
        "dev": [
            "pytest",
            "pytest-xdist",
            "pytest-timeout",
            "hypothesis",
            "beartype",
            "safetensors",
            "ruff",
            "pyright[nodejs]",
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
        "sglang.srt.plugins": ["true_on_policy = true_on_policy.engines.sglang_plugin:activate"],
        "vllm.general_plugins": ["true_on_policy = true_on_policy.engines.vllm_plugin:activate"],
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
