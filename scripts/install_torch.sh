#!/usr/bin/env bash
# Install one version of torch before anything else can choose it.
#   scripts/install_torch.sh PYTHON VERSION
# On Linux the default build of torch brings gigabytes of CUDA packages. A machine without an NVIDIA driver gets the CPU build:
# from the indexes that pip is configured with, else from PyTorch's own.
set -euo pipefail

python=$1
version=$2
pip=("$python" -m pip install --quiet --disable-pip-version-check)

installed=$("$python" -c 'from importlib.metadata import version; print(version("torch").split("+")[0])' 2>/dev/null || true)
if [ "$installed" = "$version" ]; then
  exit 0
fi

if [ "$(uname -s)" != Linux ] || command -v nvidia-smi >/dev/null 2>&1; then
  exec "${pip[@]}" "torch==$version"
fi
"${pip[@]}" "torch==$version+cpu" 2>/dev/null ||
  "${pip[@]}" --retries 1 --timeout 30 --index-url https://download.pytorch.org/whl/cpu "torch==$version" ||
  "${pip[@]}" "torch==$version"
