// Reads .dynsym of an ELF file (System V ABI, chapter 4); see exported_symbols.h.
#include "engine/plugin/exported_symbols.h"

#include <elf.h>

#include <cstring>
#include <optional>
#include <span>

#include "memory/mapped_file.h"
#include "strata/error.h"

namespace strata {
namespace {

// A copy of the T at `offset`, or nothing when it would reach beyond the end.
template <class T>
std::optional<T> at(std::span<const std::byte> bytes, uint64_t offset) {
  if (offset > bytes.size() || bytes.size() - offset < sizeof(T)) return {};
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

// The bytes of a section; empty when the file does not hold them all.
std::span<const std::byte> content(std::span<const std::byte> file, const Elf64_Shdr& section) {
  if (section.sh_offset > file.size() || section.sh_size > file.size() - section.sh_offset) return {};
  return file.subspan(section.sh_offset, section.sh_size);
}

}  // namespace

std::vector<std::string> exported_symbols(const std::string& path) {
  const MappedFile mapped(path);
  const auto file = mapped.bytes();
  const auto refuse = [&] { return Error(path + ": is not a shared library, so it cannot be a plugin."); };
  const auto header = at<Elf64_Ehdr>(file, 0);
  if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_ident[EI_CLASS] != ELFCLASS64 ||
      header->e_ident[EI_DATA] != ELFDATA2LSB || header->e_type != ET_DYN || header->e_shentsize != sizeof(Elf64_Shdr))
    throw refuse();
  const auto section = [&](uint64_t index) -> std::optional<Elf64_Shdr> {
    if (index >= header->e_shnum || header->e_shoff > file.size()) return {};
    return at<Elf64_Shdr>(file, header->e_shoff + index * sizeof(Elf64_Shdr));
  };
  std::vector<std::string> names;
  for (uint64_t i = 0; i < header->e_shnum; ++i) {
    const auto table = section(i);
    if (!table) throw Error(path + ": is a damaged shared library: its section headers reach beyond its end.");
    if (table->sh_type != SHT_DYNSYM) continue;
    const auto strings_section = section(table->sh_link);
    const auto symbols = content(file, *table);
    const auto strings = strings_section ? content(file, *strings_section) : std::span<const std::byte>();
    for (uint64_t offset = 0; const auto symbol = at<Elf64_Sym>(symbols, offset); offset += sizeof(Elf64_Sym)) {
      if (symbol->st_shndx == SHN_UNDEF || symbol->st_name >= strings.size()) continue;
      const char* name = reinterpret_cast<const char*>(strings.data()) + symbol->st_name;
      names.emplace_back(name, strnlen(name, strings.size() - symbol->st_name));
    }
  }
  return names;
}

}  // namespace strata
