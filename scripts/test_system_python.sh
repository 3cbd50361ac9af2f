#!/usr/bin/env bash
# Run the tests of checkpoints with the system's own Python, in a separate virtual environment.
#   scripts/test_system_python.sh PYTHON VENV TORCH_VERSION
# PYTHON is that of the other tests. What a pickle looks like depends on the patch release: Debian 12's 3.11.2 writes enumerations as
# no newer one does. SYSTEM_PYTHON names another interpreter than /usr/bin/python3; TEST_SYSTEM_SECONDS limits the tests (default: 900).
set -euo pipefail
trap 'echo "test-system: failed; the error is printed above (line $LINENO of $0)" >&2' ERR

python=$1
venv=$2
torch=$3
system=${SYSTEM_PYTHON:-/usr/bin/python3}

if ! "$system" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "test-system: skipped, since $system is not there or older than Python 3.11"
  exit 0
fi
release='import sys; print(sys.version.split()[0])'
if [ "$("$system" -c "$release")" = "$("$python" -c "$release")" ]; then
  echo "test-system: skipped, since the other tests run with the same release as $system"
  exit 0
fi
echo "test-system: Python $("$system" -c "$release")"

if [ ! -x "$venv/bin/pip" ]; then
  rm -rf "$venv"
  # Debian keeps what venv needs in a separate package; virtualenv brings it along.
  if ! "$system" -m venv "$venv" 2>/dev/null; then
    rm -rf "$venv"
    "$python" -m venv "$venv-maker"
    "$venv-maker/bin/python" -m pip install --quiet --disable-pip-version-check virtualenv
    "$venv-maker/bin/python" -m virtualenv --quiet --python "$system" "$venv"
  fi
fi
scripts/install_torch.sh "$venv/bin/python" "$torch"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
  -e ".[plots,remote,stream]" numpy pytest pytest-timeout pytest-xdist
export PYTHONPATH=$PWD OMP_NUM_THREADS=1
limit=()
if command -v timeout >/dev/null; then
  limit=(timeout --kill-after=30 "${TEST_SYSTEM_SECONDS:-900}")
fi
${limit[@]+"${limit[@]}"} "$venv/bin/python" -m pytest -q -n 2 --dist worksteal -m "not slow" \
  tests/security tests/checkpoints/test_{exchange,hostile_names,neighbours,saves,torch_distributed}.py
