"""Build script: the metadata is in pyproject.toml, what has to be computed at build time is here."""

import importlib.util
import platform
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command import editable_wheel

KERNELS = Path("kernels/steptron_kernels")
METRICS = Path("metrics_server/steptron_metrics")


def native_kernels():
    """The CPU kernels in C++, where torch is there to build against; Steptron works without them."""
    if importlib.util.find_spec("torch") is None:
        print("steptron: torch cannot be imported here, so the native CPU kernels are not built", file=sys.stderr)
        return {}, {}
    sys.path.insert(0, str(KERNELS.parent))
    from steptron_kernels.build import BuildNative, native_extension

    return {"ext_modules": [native_extension(KERNELS)]}, {"build_ext": BuildNative}


class EditableWheel(editable_wheel.editable_wheel):
    """Editable installation by plain paths.

    What setuptools does for more than one root, a finder behind the others, loses against a folder of the same name in
    the current directory: in the clone's parent, `import steptron` would find the clone instead of the package.
    """

    def _select_strategy(self, name, tag, build_lib):
        roots = [Path(self.project_dir) / folder for folder in (".", KERNELS.parent, METRICS.parent)]
        return editable_wheel._StaticPth(self.distribution, name, roots)


options, commands = native_kernels() if platform.system() == "Linux" else ({}, {})
setup(
    packages=find_packages(include=["steptron", "steptron.*"])
    + find_packages(str(KERNELS.parent), include=["steptron_kernels", "steptron_kernels.*"])
    + find_packages(str(METRICS.parent), include=["steptron_metrics", "steptron_metrics.*"]),
    package_dir={"steptron_kernels": str(KERNELS), "steptron_metrics": str(METRICS)},
    package_data={
        "steptron": ["data/chat/templates/*.yaml"],
        "steptron_metrics": ["protocol/*", "storage/migrations/*", "alerts/*.yaml", "http/page/*", "http/page/**/*"],
    },
    cmdclass={"editable_wheel": EditableWheel, **commands},
    **options,
)
