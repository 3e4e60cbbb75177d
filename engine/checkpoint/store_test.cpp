// Checkpoints and safetensors: round trips, lying headers, damage, other models, kills in the middle of a save.
#include "engine/checkpoint/store.h"

#include <chrono>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "strata/convert.h"
#include "strata/error.h"
#include "strata/json.h"

namespace strata::store_test {
namespace {

namespace fs = std::filesystem;

class Checkpoints : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "strata-store-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string file(const std::string& header, size_t data) const {
    const std::string path = folder_ + "/x.safetensors";
    std::ofstream out(path, std::ios::binary);
    const uint64_t length = header.size();
    out.write(reinterpret_cast<const char*>(&length), 8);
    out << header << std::string(data, 'x');
    return path;
  }
  // The message that opening a file with this header gives, without its path; "" when it opens.
  std::string message(const std::string& header, size_t data) const {
    const std::string path = file(header, data);
    try {
      SafetensorsFile opened(path);
    } catch (const Error& error) {
      return std::string(error.what()).substr(path.size() + 2);
    }
    return "";
  }
  std::string folder_;
};

TEST_F(Checkpoints, SafetensorsRoundTrip) {
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<int32_t> b = {-7};
  write_safetensors(folder_ + "/f", {{"a", DType::f32, {2, 3}, a.data()}, {"b \"quoted\"", DType::i32, {1}, b.data()}},
                    {{"format", "pt"}});
  const SafetensorsFile opened(folder_ + "/f");
  ASSERT_EQ(opened.tensors().size(), 2u);
  EXPECT_EQ(opened.tensors().at("a").shape, (Shape{2, 3}));
  EXPECT_EQ(std::memcmp(opened.read(opened.tensors().at("a")).data(), a.data(), 24), 0);
  EXPECT_EQ(std::memcmp(opened.read(opened.tensors().at("b \"quoted\"")).data(), b.data(), 4), 0);
}

TEST_F(Checkpoints, LyingHeadersAreRefused) {
  const std::string good = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  EXPECT_EQ(message(good, 8), "");
  EXPECT_EQ(message(good, 4),
            "tensor \"w\" lies at bytes 0 to 8, outside the file's 4 bytes of data; the file is truncated or damaged.");
  EXPECT_EQ(message(good, 12), "4 bytes at its end belong to no tensor.");
  EXPECT_EQ(message(R"({"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8),
            "tensor \"w\" takes 8 bytes, but its shape and dtype need 12.");
  EXPECT_EQ(message(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8),
            "tensor \"w\" lies at bytes 8 to 0, outside the file's 8 bytes of data; the file is truncated or damaged.");
  EXPECT_EQ(message(R"({"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8),
            "tensor \"w\" has a negative dimension.");
  EXPECT_EQ(message(R"({"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", 8),
            "tensor \"w\" has a shape too large for any file.");
  EXPECT_EQ(message(R"({"w":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}})", 8), "");  // of use to others
  EXPECT_EQ(message(R"({"w":{"dtype":"I65","shape":[1],"data_offsets":[0,8]}})", 8),
            "tensor \"w\" has dtype I65, which safetensors files do not have.");
  EXPECT_EQ(
      message(
          R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
          R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
          12),
      "tensors overlap at byte 4 of the data.");
  EXPECT_EQ(
      message(
          R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
          R"("b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})",
          12),
      "tensors leave a hole at byte 4 of the data.");
  EXPECT_EQ(message(R"({"w":{"dtype":"F32","shape":[2]}})", 8), "tensor \"w\" lacks \"data_offsets\".");
  EXPECT_EQ(message(R"({"w":1})", 8).substr(0, 10), "tensor \"w\"");
  EXPECT_NE(message("{", 8), "");
  EXPECT_NE(message(std::string(200, '['), 8), "");
}

CheckpointInfo info(int64_t step) { return {step, step * 10, {{"plugin.key", "value \"x\""}}, "[run]\nsteps = 3\n"}; }

TEST_F(Checkpoints, SaveAndLoadKeepTheLast) {
  CheckpointStore store(folder_, 2);
  std::vector<float> w(1000, 1.5f);
  for (int64_t step = 1; step <= 4; ++step) {
    w[0] = float(step);
    store.save(info(step), {{"w", Role::parameter, DType::f32, {10, 100}, w.data()},
                            {"m", Role::optimizer_state, DType::f32, {1000}, w.data()}});
  }
  EXPECT_EQ(store.all().size(), 2u);
  const Checkpoint checkpoint(*store.latest());
  EXPECT_EQ(checkpoint.info().step, 4);
  EXPECT_EQ(checkpoint.info().samples, 40);
  EXPECT_EQ(checkpoint.info().notes.at("plugin.key"), "value \"x\"");
  std::vector<float> read(1000);
  checkpoint.read("w", DType::f32, {10, 100}, read.data());
  EXPECT_EQ(read, w);
  EXPECT_THROW(checkpoint.read("w", DType::f32, {100, 10}, read.data()), Error);
  EXPECT_THROW(checkpoint.read("other", DType::f32, {10}, read.data()), Error);
}

// Tensors of several of the pieces that files are read in, as NVMe takes them: part by part, as another type too, boxes
// of columns; damage anywhere in the tensor is found with the first part.
TEST_F(Checkpoints, LargeTensorsAreReadInParts) {
  const Shape shape{1537, 2048};  // 12 MiB
  std::vector<float> values(size_t(elements(shape)));
  std::mt19937 random(5);
  for (float& value : values) value = float(random() % 256);  // whole in bf16
  CheckpointStore store(folder_, 1);
  store.save(info(1), {{"w", Role::parameter, DType::f32, shape, values.data()}});
  const std::string path = *store.latest();
  const Checkpoint checkpoint(path);
  const auto in_parts = [&](const Box& box, int64_t part) {
    std::vector<float> got(size_t(elements(box.extent)), -1);
    for (int64_t first = 0; first < int64_t(got.size()); first += part) {
      const int64_t count = std::min(part, int64_t(got.size()) - first);
      checkpoint.read_box("w", DType::f32, shape, box, first, count, got.data() + first);
    }
    return got;
  };
  EXPECT_EQ(in_parts(whole_box(shape), 1 << 20), values);
  EXPECT_EQ(in_parts(whole_box(shape), 777'777), values);
  const Box box{{3, 1000}, {1500, 1001}};
  std::vector<float> expected;
  for (int64_t row = 3; row < 1503; ++row)
    expected.insert(expected.end(), values.begin() + row * 2048 + 1000, values.begin() + row * 2048 + 2001);
  EXPECT_EQ(in_parts(box, 1 << 20), expected);
  EXPECT_EQ(in_parts(box, 123'457), expected);
  std::vector<uint16_t> half(1000);
  checkpoint.read_box("w", DType::bf16, shape, whole_box(shape), 2'000'000, 1000, half.data());
  for (size_t i = 0; i < half.size(); ++i) {
    float value;
    to_f32(DType::bf16, &half[i], &value, 1);
    ASSERT_EQ(value, values[2'000'000 + i]);
  }

  for (const auto& entry : fs::directory_iterator(path))  // its last number
    if (entry.path().extension() == ".safetensors") {
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(-1, std::ios::end);
      file.put('x');
    }
  const Checkpoint damaged(path);
  EXPECT_THROW(damaged.read_box("w", DType::f32, shape, whole_box(shape), 0, 10, values.data()), Error);
}

// Two ranks of ZeRO 1 wrote it before pieces had places by dimension: 1 layer, hidden 4, vocabulary 16, two steps. The
// sums of value · (index + 1) were taken from its files with a script.
TEST(OldCheckpoints, Version1IsRead) {
  const Checkpoint checkpoint(STRATA_SOURCE_DIR "/tests/reference/data/checkpoint-v1");
  EXPECT_EQ(checkpoint.info().step, 2);
  const auto sum = [&](const std::string& name, const Shape& shape) {
    std::vector<float> values(size_t(elements(shape)));
    checkpoint.read(name, DType::f32, shape, values.data());
    double total = 0;
    for (size_t i = 0; i < values.size(); ++i) total += double(values[i]) * double(i + 1);
    return total;
  };
  EXPECT_DOUBLE_EQ(sum("embedding.weight", {16, 4}), -1.2615074089262635);
  EXPECT_DOUBLE_EQ(sum("block.0.mlp.down.weight", {4, 16}), 7.032911635615164);
  ASSERT_EQ(checkpoint.tensors().at("block.0.qkv.weight.adamw.v").pieces.size(), 2u);
  EXPECT_DOUBLE_EQ(sum("block.0.qkv.weight.adamw.v", {12, 4}), 0.001750773728570053);
  // A column of what two ranks wrote by rows.
  float column[12];
  checkpoint.read_box("block.0.qkv.weight.adamw.v", DType::f32, {12, 4}, {{0, 2}, {12, 1}}, 0, 12, column);
  std::vector<float> whole(48);
  checkpoint.read("block.0.qkv.weight.adamw.v", DType::f32, {12, 4}, whole.data());
  for (size_t i = 0; i < 12; ++i) EXPECT_EQ(column[i], whole[4 * i + 2]);
}

TEST_F(Checkpoints, EveryFlippedBitIsFound) {
  CheckpointStore store(folder_, 1);
  const std::vector<float> w(64, 1.5f);
  store.save(info(1), {{"w", Role::parameter, DType::f32, {64}, w.data()}});
  std::mt19937 random(3);
  for (const char* name : {"manifest.json", "tensors-00000.safetensors"}) {
    const std::string path = *store.latest() + "/" + name;
    std::ifstream in(path, std::ios::binary);
    const std::string whole((std::istreambuf_iterator<char>(in)), {});
    for (int round = 0; round < 60; ++round) {
      std::string damaged = whole;
      const size_t at = random() % whole.size();
      damaged[at] = char(damaged[at] ^ (1 << random() % 8));
      std::ofstream(path, std::ios::binary) << damaged;
      std::vector<float> read(64);
      try {
        Checkpoint(*store.latest()).read("w", DType::f32, {64}, read.data());
        EXPECT_EQ(read, w) << name << " byte " << at;  // spaces of the layout may change, values may not
      } catch (const Error&) {
      }
    }
    std::ofstream(path, std::ios::binary) << whole;
  }
}

// kill -9 at random moments: what is named a checkpoint is always whole, and never older than the last finished save.
TEST_F(Checkpoints, KilledSavesLeaveTheOneBefore) {
  const std::vector<float> w(200'000, 2.5f);
  std::mt19937 random(4);
  int64_t finished = 0;
  std::chrono::microseconds save_time{};
  for (int round = 0; round < 25; ++round) {
    int pipe_ends[2];
    ASSERT_EQ(pipe(pipe_ends), 0);
    const pid_t child = fork();
    if (child == 0) {
      CheckpointStore store(folder_, 2);
      for (int64_t step = finished + 1;; ++step) {
        store.save(info(step), {{"w", Role::parameter, DType::f32, {200'000}, w.data()}});
        if (write(pipe_ends[1], &step, sizeof step) != sizeof step) _exit(1);
      }
    }
    close(pipe_ends[1]);
    const auto began = std::chrono::steady_clock::now();
    if (round == 0) {  // how long a save takes here
      ASSERT_EQ(read(pipe_ends[0], &finished, sizeof finished), ssize_t(sizeof finished));
      save_time = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - began);
    }
    usleep(useconds_t(random() % uint64_t(3 * save_time.count() + 1)));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    for (int64_t step; read(pipe_ends[0], &step, sizeof step) == sizeof step;) finished = step;
    close(pipe_ends[0]);
    const CheckpointStore store(folder_, 2);
    if (finished == 0) continue;
    ASSERT_TRUE(store.latest().has_value());
    const Checkpoint checkpoint(*store.latest());
    EXPECT_GE(checkpoint.info().step, finished);
    std::vector<float> read(200'000);
    checkpoint.read("w", DType::f32, {200'000}, read.data());
    EXPECT_EQ(read, w);
    finished = checkpoint.info().step;
  }
  EXPECT_GT(finished, 0);
}

TEST(JsonTest, RoundTripAndRefusals) {
  const std::string text = R"({"a":[1,2.5,true,null,"x\"\n"],"b":{"c":-3}})";
  EXPECT_EQ(Json::parse(text, "f").dump(), text);
  EXPECT_THROW(Json::parse("{\"a\":1,\"a\":2}", "f"), Error);
  EXPECT_THROW(Json::parse("[1,", "f"), Error);
  EXPECT_THROW(Json::parse("", "f"), Error);
}

}  // namespace
}  // namespace strata::store_test
