"""Package metadata. Versions come from requirements/*.txt, so that an editable install and launch/env agree.

megatron-core declares Python 3.12 and pip refuses it on 3.11, where the part used here runs. There it is left out of
``install_requires``, and the commands say what to run: pip install --no-deps --ignore-requires-python megatron-core.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent


def pins(name: str) -> list[str]:
    """Requirement lines of ``requirements/<name>.txt`` without their comments."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [pin for line in lines if (pin := line.split("#")[0].strip())]


setup(
    name="megatron-ext",
    version="0.1.0",
    description="Post-training of large Mixture-of-Experts agents on Megatron-Core",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["megatron_ext*", "recipes*", "launch*"]),
    package_data={"": ["*.yaml", "*.json", "*.j2", "*.css", "*.js"]},
    install_requires=[
        *pins("base"),
        *pins("compiled"),
        *(f"{pin}; python_version >= '3.12'" for pin in pins("megatron")),
    ],
    extras_require={"test": pins("test")},
    entry_points={"console_scripts": ["megatron-ext = launch.cli:main"]},
)
