// Moves a whole NvmeStore at a time and says how long it took: our side of tools/bench/nvme.
//   nvme_bench DIRECTORY FILE_BYTES BLOCK DEPTH TRANSFER_BYTES
// Then answers each line "read" or "write" with the bytes per second of one pass over the file, in transfers of that
// size.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <random>
#include <string>

#include "memory/arena.h"
#include "memory/nvme_store.h"
#include "strata/error.h"

using namespace strata;

static double bytes_per_second(NvmeStore& store, NvmeStore::Channel& channel, const Arena& memory, bool write) {
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t offset = 0; offset < store.bytes(); offset += memory.bytes()) {
    const int64_t bytes = std::min(memory.bytes(), store.bytes() - offset);
    if (write) {
      channel.write(offset, memory.base(), bytes, "bench");
    } else {
      channel.read(offset, memory.base(), bytes, "bench");
    }
  }
  return double(store.bytes()) / std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int main(int count, char** arguments) try {
  if (count != 6) throw Error("usage: nvme_bench DIRECTORY FILE_BYTES BLOCK DEPTH TRANSFER_BYTES");
  NvmeStore store({.directories = {arguments[1]},
                   .bytes = std::stoll(arguments[2]),
                   .depth = std::stoi(arguments[4]),
                   .block = std::stoll(arguments[3]),
                   .faults = {}});
  if (!store.note().empty()) std::cerr << store.note() << "\n";
  NvmeStore::Channel channel = store.channel();
  const Arena memory(std::stoll(arguments[5]));
  std::mt19937_64 random(1);  // nothing for a disk to compress
  for (int64_t i = 0; i < memory.bytes() / 8; ++i) reinterpret_cast<uint64_t*>(memory.base())[i] = random();
  bytes_per_second(store, channel, memory, true);  // the first pass also writes the file system's records of the blocks
  for (std::string line; std::getline(std::cin, line);) {
    std::printf("%.0f\n", bytes_per_second(store, channel, memory, line == "write"));
    std::fflush(stdout);
  }
} catch (const std::exception& error) {
  std::cerr << "nvme_bench: " << error.what() << "\n";
  return 2;
}
