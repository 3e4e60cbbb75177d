#!/usr/bin/env python3
"""Records what crosses between three ranks when made-up gradients are exchanged as int8 and int4 in blocks, rounded
stochastically, in two rounds (ZeRO++'s qgZ, Wang et al., arXiv 2306.10209, within one group): a plain NumPy program with
a Philox (Salmon et al., SC'11) and a hash of its own, into plugins/quantized_exchange/quantized_recorded.h."""
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


def mixed(x):
    """Wellons' lowbias32."""
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def random_bits(stream, block, scale):
    """16 bits for each element of a block: elements i and i + 128 share a word."""
    words, bits = philox((0, 0, STEP, 0), (SEED, stream)), int(scale.view(np.uint32))
    first, second = (mixed(mixed(words[i] + block & 0xFFFFFFFF) ^ bits) for i in (0, 1))
    numbers = np.empty(BLOCK, np.int64)
    for i in range(BLOCK // 2):
        word = mixed(first + i * 0x9E3779B9 & 0xFFFFFFFF) ^ second
        numbers[i], numbers[i + BLOCK // 2] = word & 0xFFFF, word >> 16
    return numbers


def rounded(x, largest, stream):
    """What the receiver reads of a list of numbers."""
    out = np.empty_like(x)
    for block, begin in enumerate(range(0, len(x), BLOCK)):
        part = x[begin:begin + BLOCK]
        scale = f32(np.max(np.abs(part))) / f32(largest)
        level = np.clip(part * (f32(1) / scale), -f32(largest), f32(largest)) + f32(largest)
        codes = np.floor(level * f32(65536)).astype(np.int64) + random_bits(stream, block, scale)[:len(part)] >> 16
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
