// Text files to token files with a train and a validation split: `strata data prepare`.
// Prints nothing (tools/strata/data_command.cpp does) and knows no tokenizer by name but those of tokenizer.h.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/data/chat_template.h"

namespace strata {

struct PrepareArguments {
  // UTF-8 text ("bytes" takes any), each a document; "-": standard input, once. With names that end with .jsonl, each
  // line is a document: {"text": …}, or {"messages": [{"role", "content"}, …]}, a conversation, which goes through the
  // chat template of the folder `tokenizer`, with "tools" if there are any. Other fields are not read.
  std::vector<std::string> inputs{};
  std::string output_directory{};         // made when missing
  std::string document_end{};             // a token written after each document, instead of what the tokenizer says
  std::string tokenizer = "bytes";        // or a folder with tokenizer.json, that, a .model file, or "train:SIZE"
  TrainOn train_on = TrainOn::assistant;  // of conversations: by a loss mask, or without
  double validation_fraction = 0.05;      // of each input's bytes: its end, from a line's start on
  int64_t shard_tokens = 100'000'000;     // tokens of a file at most
  // Called after each piece of about a megabyte with the bytes done and those there are, if set.
  std::function<void(int64_t done, int64_t total)> progress{};
};

struct PrepareResult {
  std::vector<std::string> files;  // train_000.bin, …, validation_000.bin, …
  int64_t train_tokens = 0, validation_tokens = 0, text_bytes = 0, vocabulary = 0;
  int64_t replaced = 0;                // places that are no UTF-8 and became U+FFFD
  int64_t documents = 0, counted = 0;  // counted: tokens that a loss mask lets count, or all
  bool masked = false;
};

// The tokens are those of each input encoded as a whole (both parts of it, where it is cut in two), with what the
// tokenizer puts around documents; around a conversation comes what its template writes, and document_end. With a
// tokenizer.json bytes that are no UTF-8 become U+FFFD, as Python's errors="replace" has it.
// Writes train_000.bin, … and validation_000.bin, … (uint16 tokens for vocabularies up to 65536, else uint32) and
// the tokenizer (load_tokenizer) into the output directory, beside each token file where its documents begin, and where
// there are conversations of which only the assistant's words count a loss mask (token_marks.h): a token counts that
// has a byte of them, in place of an earlier run's, of which nothing stays. Everything is made in a hidden folder
// inside (memory/staged_folder.h) and moved at the very end, old files away first and train_000.bin last: when the run
// fails, is killed or finds the disk full, what was there before still is. Memory stays bounded (some MiB a core, and
// what training a tokenizer takes); standard input is kept there, as its size decides the split. Throws Error (usage)
// for inputs that are missing, unreadable, empty or, with SentencePiece, no UTF-8; Error (failed) when the system
// refuses to write, or another run writes to the same folder.
PrepareResult prepare(const PrepareArguments& arguments);

}  // namespace strata
