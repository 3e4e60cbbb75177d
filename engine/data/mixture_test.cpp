// Sources by weight: each as often as it is to be, at every point of a run; and masks and documents in sequences.
#include "engine/data/mixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "engine/data/testing.h"
#include "tests/random_cases.h"

namespace strata::mixture_test {
namespace {

// A token file whose tokens are first, first + 1, …; `starts` of documents, and which tokens count, where given.
std::string write_tokens(const TestFolder& folder, const std::string& name, int64_t count, int32_t first,
                         const std::vector<int64_t>& starts = {}, const std::vector<uint8_t>& counts = {}) {
  std::vector<int32_t> tokens(size_t(count), 0);
  std::iota(tokens.begin(), tokens.end(), first);
  TokenFileWriter writer(folder / name, false);
  writer.append(tokens);
  writer.commit();
  TokenMarksWriter marks(folder / name);
  for (int64_t i = 0; i < count; ++i) {
    if (std::find(starts.begin(), starts.end(), i) != starts.end()) marks.begin_document();
    marks.append(1, counts.empty() || counts[size_t(i)]);
  }
  marks.commit();
  if (counts.empty()) std::filesystem::remove(folder / name_beside(name, kMask));
  return folder / name;
}

struct Filled {
  std::vector<int32_t> tokens, targets, documents;
  explicit Filled(int64_t length) : tokens(size_t(length), -7), targets(tokens), documents(tokens) {}
  SampleBuffers buffers() { return {tokens.data(), targets.data(), documents.data()}; }
};
Filled filled(const Sampler& sampler, int64_t sample, int64_t length) {
  Filled sequence(length);
  sampler.fill(sample, sequence.buffers());
  return sequence;
}

TEST(Mixture, EachSourceHasItsShareAtEveryPoint) {
  const TestFolder folder;
  for (uint64_t seed = test::first_seed(), end = seed + uint64_t(test::cases(20)); seed < end; ++seed) {
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed));
    test::Random random(seed);
    std::vector<DataSource> sources;
    double all = 0;
    for (int64_t s = 0, count = test::draw(random, 1, 4); s < count; ++s) {
      const std::string name = std::to_string(s);
      sources.push_back(
          {.name = name,
           .files = {write_tokens(folder, name + ".bin", 5 * test::draw(random, 2, 9), int32_t(1000 * s))},
           .weight = double(test::draw(random, 1, 1000)) / 7});
      all += sources.back().weight;
    }
    const Mixture mixture(sources,
                          {.vocabulary = 5000, .sequence_length = 4, .shuffle = true, .packed = false, .seed = 3});
    std::vector<int64_t> taken(sources.size(), 0);
    for (int64_t n = 0; n < 500; ++n) {
      Filled sequence(4);
      mixture.fill(n, sequence.buffers());
      const size_t source = size_t(sequence.tokens[0] / 1000);
      // A source's samples come in its own order, none left out.
      const Filled own = filled(mixture.of(source), taken[source], 4);
      ASSERT_EQ(sequence.tokens, own.tokens) << n;
      ++taken[source];
      for (size_t s = 0; s < sources.size(); ++s) {
        EXPECT_EQ(taken[s], mixture.taken(s, n + 1));
        // One for each division into a source and those after it.
        EXPECT_NEAR(double(taken[s]), double(n + 1) * sources[s].weight / all, double(sources.size())) << n;
      }
    }
  }
}

TEST(Mixture, SourcesOfOneTokenizerOnly) {
  const TestFolder folder;
  for (const char* name : {"a", "b"}) {
    TokenFileWriter writer(folder / (std::string(name) + ".bin"), false, name[0]);
    writer.append(std::vector<int32_t>(20, 1));
    writer.commit();
  }
  const std::string message = error_of(folder, [&] {
    Mixture({{"a", {folder / "a.bin"}, 1}, {"b", {folder / "b.bin"}, 1}},
            {.vocabulary = 9, .sequence_length = 4, .shuffle = true, .packed = false, .seed = 3});
  });
  EXPECT_EQ(message, "b.bin: was made with another tokenizer than a.bin; prepare both with the same one.");
}

TEST(Masks, LeaveTargetsOut) {
  const TestFolder folder;
  std::vector<uint8_t> counts(23, 0);
  for (size_t i : {0, 4, 5, 8, 9, 22}) counts[i] = 1;
  const TokenDataset data({write_tokens(folder, "t.bin", 23, 100, {}, counts)}, 1000);
  EXPECT_TRUE(data.masked());
  const Sampler sampler(data, 4, false, 0);
  ASSERT_EQ(sampler.sequences(), 5);
  EXPECT_EQ(filled(sampler, 0, 4).targets, (std::vector<int32_t>{-1, -1, -1, 104}));
  EXPECT_EQ(filled(sampler, 1, 4).targets, (std::vector<int32_t>{105, -1, -1, 108}));
  EXPECT_EQ(filled(sampler, 2, 4).targets, (std::vector<int32_t>{109, -1, -1, -1}));
  EXPECT_EQ(filled(sampler, 3, 4).targets, (std::vector<int32_t>(4, -1)));
  for (int64_t sample = 0; sample < 5; ++sample) {
    const auto targets = filled(sampler, sample, 4).targets;
    EXPECT_EQ(sampler.counted(sample), 4 - std::count(targets.begin(), targets.end(), -1));
  }
}

// A pack as it should be, token by token.
void expect_pack(const Filled& sequence, const std::vector<int64_t>& starts, const std::vector<uint8_t>& counts) {
  const auto begins = [&](int64_t token) { return std::find(starts.begin(), starts.end(), token) != starts.end(); };
  int32_t document = 0;
  for (size_t p = 0; p < sequence.tokens.size(); ++p) {
    const int32_t token = sequence.tokens[p] - 1;  // tokens count from 1, padding is 0
    const bool padding = token < 0;
    if (p > 0 && (padding ? sequence.tokens[p - 1] > 0 : begins(token))) document = int32_t(p);
    EXPECT_EQ(sequence.documents[p], document) << p;
    if (padding) {
      EXPECT_EQ(sequence.targets[p], -1) << p;
    } else if (sequence.targets[p] >= 0) {
      EXPECT_EQ(sequence.targets[p], token + 2) << p;
    }
    if (sequence.targets[p] >= 0) {
      EXPECT_TRUE(!begins(token + 1) && (counts.empty() || counts[size_t(token) + 1])) << p;
    }
  }
}

TEST(Packs, EveryDocumentIsPredictedOnceAndWholeWhereItFits) {
  const TestFolder folder;
  for (uint64_t seed = test::first_seed(), end = seed + uint64_t(test::cases(40)); seed < end; ++seed) {
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed));
    test::Random random(seed);
    const int64_t length = test::draw(random, 1, 12), documents = test::draw(random, 1, 12);
    std::vector<int64_t> starts;
    int64_t tokens = 0;
    for (int64_t d = 0; d < documents; ++d) {
      starts.push_back(tokens);
      tokens += test::draw(random, 1, 2 * length + 1);
    }
    if (tokens < 2) continue;
    std::vector<uint8_t> counts;
    if (test::draw(random, 0, 1))
      for (int64_t i = 0; i < tokens; ++i) counts.push_back(uint8_t(test::draw(random, 0, 1)));
    const TokenDataset data({write_tokens(folder, "t.bin", tokens, 1, starts, counts)}, 1000);
    if (tokens == documents) continue;  // refused, below
    const Sampler sampler(data, length, false, 0, true);
    std::vector<int> predicted(size_t(tokens), 0);
    for (int64_t sample = 0; sample < sampler.sequences(); ++sample) {
      const Filled sequence = filled(sampler, sample, length);
      expect_pack(sequence, starts, counts);
      int64_t counted = 0;
      for (size_t p = 0; p < sequence.targets.size(); ++p) {
        if (sequence.targets[p] < 0) continue;
        ++counted;
        const int64_t token = sequence.targets[p] - 1;
        ++predicted[size_t(token)];
        // A document that fits is there from its first token on.
        const auto next = std::upper_bound(starts.begin(), starts.end(), token);
        const int64_t begin = *std::prev(next), stop = next == starts.end() ? tokens : *next;
        if (stop - begin - 1 <= length) {
          EXPECT_EQ(sequence.tokens[size_t(sequence.documents[p])], begin + 1);
        }
      }
      EXPECT_EQ(sampler.counted(sample), counted);
    }
    for (int64_t token = 0; token < tokens; ++token) {
      const bool first = std::find(starts.begin(), starts.end(), token) != starts.end();
      EXPECT_EQ(predicted[size_t(token)], !first && (counts.empty() || counts[size_t(token)])) << token;
    }
  }
}

TEST(Marks, WhatDoesNotFitIsRefusedWithItsFile) {
  const TestFolder folder;
  write_tokens(folder, "a.bin", 20, 1, {0, 5}, std::vector<uint8_t>(20, 1));
  const std::string mask = folder.read("a.mask"), documents = folder.read("a.documents");
  const auto refused = [&](const std::string& name, const std::string& content) {
    folder.write(name, content);
    const std::string message = error_of(folder, [&] { TokenDataset({folder / "a.bin"}, 1000); });
    folder.write("a.mask", mask), folder.write("a.documents", documents);
    return message;
  };
  const std::string again = "make both again with: strata data prepare.";
  std::string longer = mask;
  longer[8] = 24;
  EXPECT_EQ(refused("a.mask", longer), "a.mask: is of 24 tokens, but a.bin has 20; " + again);
  EXPECT_EQ(refused("a.mask", mask + "x"),
            "a.mask: says that it is of 20 tokens, whose bits take 3 bytes, but it has 4. Make or copy it again.");
  const std::string none =
      "a.mask: is no loss mask: it does not begin with \"strmask1\" and a number of tokens. Make it and a.bin again "
      "with: strata data prepare.";
  EXPECT_EQ(refused("a.mask", ""), none);
  EXPECT_EQ(refused("a.mask", documents), none);
  const std::string order =
      "a.documents: must be whole numbers that ascend from 0 to below the 20 tokens of a.bin. Make "
      "both again with: strata data prepare.";
  for (const int at : {16, 24})
    for (const char value : {5, 21}) {  // 5, 5; 0, 21; …
      std::string wrong = documents;
      if (wrong[size_t(at)] == value) continue;
      wrong[size_t(at)] = value;
      EXPECT_EQ(refused("a.documents", wrong), order) << at << " " << int(value);
    }
  EXPECT_EQ(refused("a.documents", documents + "x"), order);
  EXPECT_EQ(refused("a.documents", documents), "no error");

  write_tokens(folder, "b.bin", 20, 1);
  const auto both = [&](const std::string& first, const std::string& second) {
    return error_of(folder, [&] { TokenDataset({folder / first, folder / second}, 1000); });
  };
  const std::string lacks =
      "b.bin: has no loss mask (b.mask), but a.bin has one; prepare them together, or make them two "
      "sources ([sources.NAME]).";
  for (const std::string& message : {both("a.bin", "b.bin"), both("b.bin", "a.bin")}) {
    std::string plain = message;
    for (size_t at; (at = plain.find(folder.path() + "/")) != plain.npos;) plain.erase(at, folder.path().size() + 1);
    EXPECT_EQ(plain, lacks);
  }

  std::filesystem::remove(folder / "b.documents");
  const TokenDataset without({folder / "b.bin"}, 1000);
  EXPECT_EQ(error_of(folder, [&] { Sampler(without, 4, false, 0, true); }),
            "b.bin: does not say where its documents begin (b.documents), which data.packed needs; prepare it again "
            "with: strata data prepare.");
  const TokenDataset alone({write_tokens(folder, "c.bin", 1, 1, {0})}, 1000);
  EXPECT_EQ(error_of(folder, [&] { Sampler(alone, 4, false, 0, true); }),
            "c.bin: holds no document of at least two tokens; there is nothing to predict.");
}

}  // namespace
}  // namespace strata::mixture_test
