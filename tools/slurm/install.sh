#!/usr/bin/env bash
# Installs Steptron, Megatron-Core and the native CPU kernels beside a torch that is already there and stays as it is.
# For the build of a container image, or in a virtual environment on a shared file system:
#
#   tools/slurm/install.sh
#
#   PYTHON            interpreter that has torch; python3
#   MEGATRON_VERSION  0.16.1 on Python 3.11, 0.19.2 on 3.12, which are the tested pairs
#   STEPTRON_MARCH    processor that the native kernels are built for, as gcc names it: x86-64-v4 for nodes with
#                     AVX-512. x86-64-v3, as the machine that builds need not be the one that runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
export STEPTRON_MARCH=${STEPTRON_MARCH:-x86-64-v3}
# NVIDIA's images pin hundreds of packages by this variable; some pins are older than what Steptron needs.
unset PIP_CONSTRAINT

constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
"$python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$constraints"
megatron=${MEGATRON_VERSION:-$("$python" -c 'import sys; print("0.16.1" if sys.version_info < (3, 12) else "0.19.2")')}

"$python" -m pip install 'setuptools>=77' ninja
# Without build isolation the native kernels are compiled against the torch that is there.
"$python" -m pip install --no-build-isolation -c "$constraints" "megatron-core==$megatron" .
cd /
"$python" -P -c 'import sys; from steptron_kernels.extension import why_unfit as why; sys.exit(why())'
steptron=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/steptron
"$steptron" version
