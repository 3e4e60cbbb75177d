#!/usr/bin/env bash
# The bundle for machines with a GPU: small enough to carry, and it starts up anywhere. gpu_check.sh BUILD_FOLDER
set -euo pipefail
set -- "$(realpath "$1")"
[[ -e $1/lib/strata/devices/cuda.so ]] || { echo "gpu_check: built without CUDA"; exit 77; }
root=$(cd "$(dirname "$0")/.." && pwd)
# What is looked up when a run begins is in the libraries of this toolkit.
names() { grep -ohE "$1" "$root"/cuda/*.cpp | grep -oE '(nccl|cublasLt)[A-Z][A-Za-z]*' | sort -u; }
for pair in 'libnccl.so.2 STRATA_NCCL\(nccl[A-Za-z]*\)' 'libcublasLt.so "cublasLt[A-Za-z]*"'; do
  read -r library pattern <<<"$pair"
  file=$(find -L /usr/local/cuda/lib64 /usr/lib/x86_64-linux-gnu -maxdepth 1 -name "$library*" 2>/dev/null | sort | sed -n 1p)
  [[ -n $file ]] || continue
  there=$(nm -D --defined-only "$file" | sed 's/.* //; s/@.*//')
  for name in $(names "$pattern"); do grep -qx "$name" <<<"$there" || { echo "gpu_check: $file lacks $name"; exit 1; }; done
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
# Where no GPU was there to compile for, the driver of one will: what it is given is assembled here.
tools=$(sed -n 's/^STRATA_NVCC:FILEPATH=\(.*\)\/nvcc$/\1/p' "$1/CMakeCache.txt")
if [[ -x $tools/cuobjdump && -x $tools/ptxas && -z $("$tools/cuobjdump" --list-elf "$1/lib/strata/devices/cuda.so" 2>/dev/null | grep 'kernels.*cubin' || true) ]]; then
  "$tools/cuobjdump" -xptx all "$1/lib/strata/devices/cuda.so" >/dev/null
  files=(*.ptx)
  ((${#files[@]} >= 2)) || { echo "gpu_check: no PTX in cuda.so"; exit 1; }
  for file in "${files[@]}"; do "$tools/ptxas" -arch=sm_90 -O0 "$file" -o one.cubin; done
fi
"$root/tools/gpu-check" bundle bundle.tar.xz --build "$1"
(($(stat -c %s bundle.tar.xz) < 60 << 20))
if nvidia-smi >/dev/null 2>&1; then
  "$root/tools/gpu-check" run --bundle bundle.tar.xz --quick
  grep -q '^## Tests' gpu-report/report.md
else
  status=0
  "$root/tools/gpu-check" run --bundle bundle.tar.xz 2>error || status=$?
  [[ $status == 2 ]] && grep -q 'no CUDA device' error || { cat error; exit 1; }
  [[ ! -e gpu-report ]]
fi
echo "gpu_check: as expected"
