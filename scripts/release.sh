#!/usr/bin/env bash
# Build the sdist and the wheel, install the wheel into a fresh environment outside of the clone, and try it there as a user would.
#   scripts/release.sh PYTHON DIST
# PYTHON has hatchling, and its release makes the fresh environment; DIST is where the files go. They are removed from there first.

# -E, so that the trap also tells of what fails in a function.
set -Eeuo pipefail
trap 'echo "release: failed; the error is printed above (line $LINENO of $0)" >&2' ERR

python=$1
dist=$2
clone=$PWD
if [ -n "$(git status --porcelain)" ]; then
  echo "release: warning: the files contain changes that are not committed" >&2
fi
rm -rf "$dist"
"$python" -m hatchling build -d "$dist"
for file in "$dist"/*; do
  echo "$(wc -c <"$file") bytes  $file  sha256 $(sha256sum "$file" | cut -d ' ' -f 1)"
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/environment"
fresh=$scratch/environment/bin
torch=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' constraints.txt)
scripts/install_torch.sh "$fresh/python" "$torch"
"$fresh/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$(ls "$clone/$dist"/*.whl)[examples]"

# README's program, from a directory that knows nothing of the clone.
awk '/^```python title="digits.py"/ { on = 1; next } /^```/ { on = 0 } on' README.md >"$scratch/digits.py"
cd "$scratch"
# Half an hour is many times what each of them takes on two busy cores: one that takes longer hangs, and is ended with 124.
run() {
  begun=$SECONDS
  echo "\$ $*"
  env -u PYTHONPATH PATH="$fresh:$PATH" OMP_NUM_THREADS=1 timeout --kill-after 10 1800 "$@"
  echo "release: $1 ended after $((SECONDS - begun)) s"
}
run python digits.py --epochs 2 --dir run
run python digits.py --epochs 3 --dir run --auto_resume true
run torchrun --standalone --nproc-per-node 2 digits.py --epochs 1 --dir two
run danling verify run
# On a busy machine, a compilation has taken more than doctor's usual three minutes.
run danling doctor --timeout 900
echo "release: $(ls "$clone/$dist" | tr '\n' ' ')work"
