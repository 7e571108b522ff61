#!/usr/bin/env bash
# Makes a squashfs image for pyxis (IMAGE of the jobs) in a folder that all nodes see:
#
#   tools/slurm/import-container.sh /shared/steptron.sqsh
#
#   SOURCE  where the image comes from, as enroot names it: dockerd://steptron, built on this machine, or
#           docker://REGISTRY#NAME:TAG. dockerd://steptron
set -euo pipefail
image=${1:?give the file to write, such as /shared/steptron.sqsh}
if [[ -e $image ]]; then
    echo "steptron: $image exists; running jobs may use it: write another file" >&2
    exit 1
fi
# Under its name only when it is complete: 512 nodes read it.
partial=$image.partial.$$
trap 'rm -f "$partial"' EXIT
enroot import --output "$partial" "${SOURCE:-dockerd://steptron}"
mv "$partial" "$image"
echo "steptron: IMAGE=$image sbatch tools/slurm/two-nodes.sbatch"
