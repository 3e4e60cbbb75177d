#!/usr/bin/env python3
"""Records what crosses between three ranks when made-up gradients are exchanged as int8 and int4 in blocks, rounded
stochastically, in two rounds (ZeRO++'s qgZ, Wang et al., arXiv 2306.10209, within one group): a plain NumPy program with
a Philox of its own (Salmon et al., SC'11), into plugins/quantized_exchange/quantized_recorded.h."""
import numpy as np

RANKS, ROWS, COLUMNS, BLOCK = 3, 13, 97, 256
SEED, STREAM, STEP = 7, 1000, 3
SHARES = [(0, 5), (5, 9), (9, 13)]
f32 = np.float32


def gradient(rank):
    i, j = np.meshgrid(np.arange(ROWS), np.arange(COLUMNS), indexing="ij")
    return f32(np.sin(1.7 * i + 2.3 * j * (rank + 1)) * np.exp(0.3 * i - 0.02 * j))


def philox(counter, key):
    """Four words of 32 bits: ten rounds."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def uniform(stream, block, scale):
    """A number for each element of a block: element i is of counter i % 32, half-word i // 32."""
    numbers = np.empty(BLOCK, f32)
    for lane in range(32):
        words = philox((block * 32 + lane, 0, STEP, int(scale.view(np.uint32))), (SEED, stream))
        for half in range(8):
            numbers[half * 32 + lane] = ((words[half // 2] >> (16 * (half % 2)) & 0xFFFF) + 0.5) / 65536
    return numbers


def rounded(x, largest, stream):
    """What the receiver reads of a list of numbers."""
    out = np.empty_like(x)
    for block, begin in enumerate(range(0, len(x), BLOCK)):
        part = x[begin:begin + BLOCK]
        scale = f32(np.max(np.abs(part))) / f32(largest)
        level = np.clip(part * (f32(1) / scale), -f32(largest), f32(largest)) + f32(largest)
        codes = np.minimum(np.floor(level + uniform(stream, block, scale)[:len(part)]), 2 * largest)
        out[begin:begin + BLOCK] = (codes - largest).astype(f32) * scale
    return out


def main():
    with open("plugins/quantized_exchange/quantized_recorded.h", "w") as out:
        out.write("// Recorded by tests/reference/quantized.py: made-up gradients of three ranks, exchanged by a NumPy program.\n"
                  "#pragma once\n\n// clang-format off\nnamespace strata::quantized::recorded {\n"
                  f"constexpr int kRanks = {RANKS}, kRows = {ROWS}, kColumns = {COLUMNS};\n"
                  f"constexpr unsigned kSeed = {SEED}, kStream = {STREAM}, kStep = {STEP};\n")
        for name, largest in (("Int8", 127), ("Int4", 7)):
            sums, results = [], []
            for share, (first, last) in enumerate(SHARES):
                lists = [rounded(gradient(rank)[first:last].ravel(), largest, STREAM + share) for rank in range(RANKS)]
                total = lists[0]
                for one in lists[1:]:
                    total = total + one
                sums.append(total)
                results.append(rounded(total, largest, STREAM + 10))
            for what, values in (("Sums", sums), ("Results", results)):
                text = ",".join(f"{v:.9g}" for v in np.concatenate(values))
                out.write(f"constexpr double k{what}Of{name}[] = {{{text}}};\n")
        out.write("}  // namespace strata::quantized::recorded\n")


main()
