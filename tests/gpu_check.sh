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
. "$root/tests/common.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
# Where no GPU was there to compile for, the driver of one will: the PTX that it is given is assembled here.
ptxas=$(sed -n 's/^STRATA_NVCC:FILEPATH=\(.*\)nvcc$/\1ptxas/p' "$1/CMakeCache.txt")
python3 - "$1/lib/strata/devices/cuda.so" <<'PYTHON'
import pathlib, re, sys
for i, text in enumerate(re.findall(rb"\.version \d+\.\d+\n\.target sm_[^\0]*", pathlib.Path(sys.argv[1]).read_bytes())):
    pathlib.Path(f"{i}.ptx").write_bytes(text)
PYTHON
if ! nvidia-smi >/dev/null 2>&1 && grep -q '^STRATA_CUDA_CODE:STRING=$' "$1/CMakeCache.txt"; then
  [[ -e 1.ptx ]] || { echo "gpu_check: no PTX in cuda.so"; exit 1; }
  for file in *.ptx; do "$ptxas" -arch=sm_90 -O0 "$file" -o one.cubin || { echo "gpu_check: cuda.so has PTX that is wrong"; exit 1; }; done
fi
"$root/tools/gpu-check" bundle bundle.tar.xz --build "$1"
expect 2 "no shape has one of these in its name: GPT-5." "$root/tools/gpu-check" run --bundle bundle.tar.xz --shape GPT-5
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
