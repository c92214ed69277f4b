// Cuts rows into units, and launches CUDA's kernels.
#include "engine/moves/row_kernel.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "engine/moves/kernel_launch.h"
#include "kernels/move_rows_ptx.h"

namespace tdcopier {
namespace {

// As many accesses as keep the link busy: the other multiprocessors are left to the caller's
// kernels. On an H200, 16 blocks take up to 1.4 times as long, and 64 are no faster.
constexpr unsigned kRowBlocks = 32;
constexpr unsigned kRowThreads = 256;
constexpr unsigned kNumberThreads = 1024;

// A table takes five words of a launch's parameters, and two numbers of the host take one.
constexpr size_t kTableWords = sizeof(RowTableMove) / sizeof(uint64_t);
constexpr size_t kMostWords = 4086;
constexpr size_t kMostHostNumbers = 4096;  // of one launch; the next ones are for another launch
constexpr uint64_t kMostUnits = uint64_t{1} << 31;

template <size_t kWords>
struct RowParameters {
  uint64_t numbers;
  uint32_t tables;
  uint32_t units;
  uint32_t scatter;
  uint32_t unused = 0;
  uint64_t words[kWords];
};
static_assert(sizeof(RowTableMove) == 40, "as in kernels/move_rows.cu");
static_assert(sizeof(RowParameters<kMostWords>) <= 32764, "what a kernel's parameters may hold");

enum RowFunctions : size_t { kFewRows, kSomeRows, kManyRows, kNumberRows };

CudaKernels& cuda_row_kernels() {
  static constexpr const char* kNames[] = {"move_rows_506", "move_rows_2298", "move_rows_4086",
                                           "number_rows"};
  static auto& kernels = *new CudaKernels("a move of rows", kMoveRowsPtx, kNames);
  return kernels;
}

size_t words_of(const RowMove& move) {
  const size_t numbers = move.numbers != nullptr ? (move.number_count + 1) / 2 : 0;
  return move.table_count * kTableWords + numbers;
}

template <size_t kWords>
void move_with(const c10::Stream& stream, const RowMove& move, size_t function) {
  RowParameters<kWords> parameters;
  parameters.numbers = reinterpret_cast<uint64_t>(move.numbers_on_device);
  parameters.tables = static_cast<uint32_t>(move.table_count);
  parameters.units = move.units;
  parameters.scatter = move.scatter;
  const size_t tables = move.table_count * kTableWords;
  std::memcpy(parameters.words, move.tables, tables * sizeof(uint64_t));
  for (size_t i = 0; move.numbers != nullptr && i < move.number_count; i += 2) {
    const bool is_last = i + 1 == move.number_count;
    const auto second = is_last ? 0 : static_cast<uint64_t>(move.numbers[i + 1]);
    parameters.words[tables + i / 2] = static_cast<uint64_t>(move.numbers[i]) | second << 32;
  }
  void* arguments[] = {&parameters};
  const unsigned blocks = std::min(kRowBlocks, (move.units + kRowThreads - 1) / kRowThreads);
  cuda_row_kernels().launch(stream, function, blocks, kRowThreads, arguments);
}

void move_on_cuda(const c10::Stream& stream, const RowMove& move) {
  const size_t words = words_of(move);
  if (words <= 506) return move_with<506>(stream, move, kFewRows);
  if (words <= 2298) return move_with<2298>(stream, move, kSomeRows);
  move_with<kMostWords>(stream, move, kManyRows);
}

void number_on_cuda(const c10::Stream& stream, const RowNumbering& numbering) {
  RowNumbering copy = numbering;
  void* arguments[] = {&copy.index,   &copy.number_bytes, &copy.count, &copy.rows,
                       &copy.numbers, &copy.bad,          &copy.last,  &copy.last_mask};
  cuda_row_kernels().launch(stream, kNumberRows, 1, kNumberThreads, arguments);
}

std::atomic<bool> g_row_kernels_used = true;

using KernelsByType = std::array<const RowKernels*, c10::COMPILE_TIME_MAX_DEVICE_TYPES>;

KernelsByType& kernels_by_type() {
  static constexpr RowKernels kOnCuda{move_on_cuda, number_on_cuda};
  static KernelsByType kernels = [] {
    KernelsByType made{};
    made[static_cast<size_t>(c10::DeviceType::CUDA)] = &kOnCuda;
    return made;
  }();
  return kernels;
}

uint32_t unit_of(uint64_t numbers) {
  uint32_t unit = 16;
  while (numbers % unit != 0) unit /= 2;
  return unit;
}

}  // namespace

void set_row_kernels(c10::DeviceType type, const RowKernels& kernels) {
  kernels_by_type()[static_cast<size_t>(type)] = &kernels;
}

const RowKernels* row_kernels(c10::Device device) {
  if (device.is_cpu() || !g_row_kernels_used.load(std::memory_order_relaxed)) return nullptr;
  if (device.type() == c10::DeviceType::CUDA && !cuda_row_kernels().on(device).lack.empty()) {
    return nullptr;
  }
  return kernels_by_type()[static_cast<size_t>(device.type())];
}

void use_row_kernels(bool use) {
  g_row_kernels_used = use;
}

void RowMoves::add(const std::byte* table, RowLayout layout, const std::byte* values) {
  const auto rows = reinterpret_cast<uint64_t>(table);
  const auto target = reinterpret_cast<uint64_t>(values);
  const auto stride = static_cast<uint64_t>(layout.stride_bytes);
  const uint32_t unit = unit_of(rows | target | stride | layout.row_bytes);
  tables_.push_back(
      {rows, target, layout.stride_bytes, 0, static_cast<uint32_t>(layout.row_bytes / unit), unit});
  bytes_ += layout.row_bytes * count_;
}

// Calls launch(tables, first number, count of numbers, units) for as many rows of tables at a time
// as a kernel's parameters hold. Returns the number of calls.
template <typename Launch>
size_t RowMoves::for_each_launch(const Launch& launch) const {
  const size_t most_numbers = numbers_ != nullptr ? kMostHostNumbers : count_;
  const size_t number_words = numbers_ != nullptr ? (std::min(count_, most_numbers) + 1) / 2 : 0;
  const size_t most_tables = (kMostWords - number_words) / kTableWords;
  size_t launches = 0;
  RecycledVector<RowTableMove> tables;
  for (size_t first = 0; first < count_; first += most_numbers) {
    const size_t count = std::min(most_numbers, count_ - first);
    for (size_t next = 0; next < tables_.size();) {
      tables.clear();
      uint64_t units = 0;
      for (; next < tables_.size() && tables.size() < most_tables; ++next) {
        const uint64_t of_table = tables_[next].units_of_row * count;
        if (units + of_table > kMostUnits) break;
        tables.push_back(tables_[next]);
        tables.back().first_unit = static_cast<uint32_t>(units);
        tables.back().values += first * tables_[next].row_bytes();
        units += of_table;
      }
      launch(tables, first, count, static_cast<uint32_t>(units));
      ++launches;
    }
  }
  return launches;
}

size_t RowMoves::launches() const {
  return for_each_launch([](const auto&...) {});
}

size_t RowMoves::enqueue(const RowKernels& kernels, const c10::Stream& stream, bool scatter) const {
  return for_each_launch(
      [&](const RecycledVector<RowTableMove>& tables, size_t first, size_t count, uint32_t units) {
        const int64_t* const numbers = numbers_ != nullptr ? numbers_ + first : nullptr;
        kernels.move(stream,
                     {tables.data(), tables.size(), numbers, on_device_, count, units, scatter});
      });
}

}  // namespace tdcopier
