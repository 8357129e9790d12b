#!/usr/bin/env bash
# Downloads into wheels/ the packages that a GPU machine with Python 3.12 and torch lacks.
#
#   benchmarks/gpu/wheels.sh            the peers and what our trainer imports, 6 MB: for visit 1
#   benchmarks/gpu/wheels.sh --cute     also QuACK, and the CuTe-DSL of QuACK and Liger SM90, about
#                                       100 MB: for visit 2
#
# The wheels become one archive, because a call carries at most 8 paths. The archive is split into
# pieces, each in a separate folder, because only 64 MiB travel in one call. The
# folders are wheels/00/, wheels/01/ and so on. The last lines of the output are the calls, and
# session.sh joins the pieces. Nothing is installed. Versions come from constraints.txt or from this
# file. PYTHON=... selects a different pip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
small=(trl datasets dill multiprocess liger-kernel cut-cross-entropy
    pydantic pydantic-core annotated-types typing-inspection)
dsl=4.6.2 # the version that QuACK 0.6.4 requires; Liger takes 4.6 and later
cute=(quack-kernels==0.6.4 einops==0.8.2 apache-tvm-ffi==0.1.12 torch-c-dlpack-ext==0.1.5
    nvidia-cutlass-dsl{,-libs-core,-libs-base,-libs-cu13}==$dsl)
piece=$((36 * 1024 * 1024)) # bytes: together with the tree less than 64 MiB
target=(--only-binary=:all: --python-version 3.12 --implementation cp)
target+=(--abi cp312 --abi abi3 --abi none)
for glibc in 2_28 2_27 2_24 2_17; do
    target+=(--platform "manylinux_${glibc}_x86_64")
done
target+=(--platform manylinux2014_x86_64 --platform any)

wanted=("${small[@]}")
if [ "${1:-}" = --cute ]; then
    wanted+=("${cute[@]}")
elif [ $# -gt 0 ]; then
    echo "wheels.sh: expected no argument or --cute, got $1" >&2
    exit 2
fi

rm -rf wheels
mkdir wheels
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for name in "${wanted[@]}"; do
    pin=$(grep -iE "^${name//-/[-_]}==" constraints.txt | head -n 1 || true)
    "$python" -m pip download -q --disable-pip-version-check --no-deps "${target[@]}" -d "$scratch" \
        "${pin:-$name}"
done

for wheel in "$scratch"/*.whl; do
    unpacked=$("$python" -c 'import sys, zipfile
print(sum(entry.file_size for entry in zipfile.ZipFile(sys.argv[1]).infolist()))' "$wheel")
    awk -v name="$(basename "$wheel")" -v a="$(stat -c %s "$wheel")" -v b="$unpacked" \
        'BEGIN { printf "%-66s %7.1f MiB, unpacked %7.1f MiB\n", name, a / 2^20, b / 2^20 }'
done

(cd "$scratch" && tar -c -- *.whl) | split -d -b "$piece" - "$scratch/wheels.tar."
pieces=("$scratch"/wheels.tar.*)
for part in "${pieces[@]}"; do
    folder=wheels/${part##*.}
    mkdir "$folder"
    mv "$part" "$folder"
    command=true
    if [ "$part" = "${pieces[-1]}" ]; then command='bash benchmarks/gpu_session.sh --commit HASH'; fi
    echo "a call carries $folder and runs: $command"
done
