#!/bin/sh
# Makes the image of these tasks, a small Debian with Python, for podman or docker; needs mmdebstrap, and root.
#     sh examples/terminal/make_image.sh [podman|docker]
set -e
engine=${1:-podman}
image=localhost/local/debian:bookworm
if "$engine" image inspect "$image" >/dev/null 2>&1; then exit; fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mmdebstrap --quiet --variant=minbase --mode=root --include=python3-minimal,tmux bookworm "$folder/root.tar"
"$engine" import "$folder/root.tar" "$image"
