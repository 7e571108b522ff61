"""Build script: the metadata is in pyproject.toml, what has to be computed at build time is here."""

import importlib.util
import platform
import sys
from pathlib import Path

from setuptools import find_packages, setup

KERNELS = Path("kernels/steptron_kernels")


def native_kernels():
    """The CPU kernels in C++, where torch is there to build against; Steptron works without them."""
    if importlib.util.find_spec("torch") is None:
        print("steptron: torch cannot be imported here, so the native CPU kernels are not built", file=sys.stderr)
        return {}
    sys.path.insert(0, str(KERNELS.parent))
    from steptron_kernels.build import BuildNative, native_extension

    return {"ext_modules": [native_extension(KERNELS)], "cmdclass": {"build_ext": BuildNative}}


setup(
    packages=find_packages(include=["steptron", "steptron.*"])
    + find_packages(str(KERNELS.parent), include=["steptron_kernels", "steptron_kernels.*"]),
    package_dir={"steptron_kernels": str(KERNELS)},
    package_data={"steptron_kernels": ["_native*.so", "_native*.json"]},
    **(native_kernels() if platform.system() == "Linux" else {}),
)
