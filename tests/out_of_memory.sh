#!/usr/bin/env bash
# Memory that runs out at any moment is one message and exit code 1, and nothing half-written is left: from one allocation
# on, drawn by chance, none succeeds any more. out_of_memory.sh BUILD_FOLDER; STRATA_SEED and STRATA_CASES draw others.
set -euo pipefail
strata=$(realpath "$1")/bin/strata
if [[ $(ldd "$strata" "$(dirname "$strata")/../lib/libstrata.so") =~ lib(a|t|ub)san ]]; then
  echo "skipped: a sanitizer has an allocator of its own"
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$(dirname "$(realpath "$0")")/common.sh"
cd "$work"
prepare_data
cat >config.toml <<TOML
[run]
steps = 2
directory = "run"
[model]
plugin = "gpt"
layers = 1
hidden = 32
heads = 2
[data]
train = ["data/train_*.bin"]
sequence_length = 16
global_batch = 2
micro_batch = 1
[device]
threads = 1
[plugins.adamw]
TOML
# Counts from where main begins: it is the first to ask for its own frames.
cat >fail.cpp <<'CPP'
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
namespace {
std::atomic<bool> counts{false};
std::atomic<long> count{0};
std::atomic<long> last{0};
void* get(std::size_t size) {
  if (counts && ++count >= last && last > 0) throw std::bad_alloc();
  void* const memory = std::malloc(size ? size : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
struct AtExit {
  ~AtExit() {
    if (std::getenv("STRATA_COUNT")) std::fprintf(stderr, "allocations %ld\n", count.load());
  }
} at_exit;
}  // namespace
extern "C" int backtrace(void**, int) {
  if (const char* const text = std::getenv("STRATA_FAIL_AT")) last = std::atol(text);
  counts = true;
  return 0;
}
void* operator new(std::size_t size) { return get(size); }
void* operator new[](std::size_t size) { return get(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
CPP
g++ -O1 -shared -fPIC -o fail.so fail.cpp
"$strata" train config.toml --set run.directory=trained >/dev/null 2>&1
"$strata" export config.toml exported --checkpoint trained >/dev/null
python3 - "$strata" <<'PYTHON' || failures=$((failures + 1))
import glob, os, random, re, shutil, subprocess, sys

strata, failures = sys.argv[1], 0
seed, cases = int(os.environ.get("STRATA_SEED", 1)), int(os.environ.get("STRATA_CASES", 8))
draw = random.Random(seed)
commands = [["train", "config.toml"], ["plan", "config.toml", "--json"], ["data", "prepare", "text", "--output", "prepared"],
            ["export", "config.toml", "target", "--checkpoint", "trained"], ["import", "exported", "target"],
            ["generate", "config.toml", "--checkpoint", "trained", "--tokens", "3"]]


def run(words, **variables):
    for folder in ("run", "prepared", "target"):
        shutil.rmtree(folder, ignore_errors=True)
    return subprocess.run([strata, *words], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL,
                          timeout=500, env={**os.environ, "LD_PRELOAD": os.path.abspath("fail.so"), **variables})


for words in commands:
    total = int(re.search(r"allocations (\d+)", run(words, STRATA_COUNT="1").stderr)[1])
    assert total > 500, total
    for at in [draw.randint(1, total) for _ in range(cases)]:
        done = run(words, STRATA_FAIL_AT=str(at))
        left = [path for path in glob.glob("**/.*", recursive=True) if "/" in path] + glob.glob("**/*.tmp-*", recursive=True)
        # What is not needed may do without, as the end of the last step does.
        if done.returncode not in (0, 1) or (done.returncode == 1) != ("out of memory" in done.stderr) or left:
            failures += 1
            print(f"FAILED: {' '.join(words)}, allocation {at} of {total}: exit {done.returncode}, left {left}: {done.stderr[-500:]}")
print(f"{len(commands) * cases} cases of seed {seed}")
sys.exit(failures > 0)
PYTHON
finish out_of_memory
