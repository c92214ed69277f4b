// Does on the host what the CUDA kernels in csrc/kernels/move_rows.cu do, in the order of a stream.
#include "sim/row_kernels.h"

#include <c10/util/StringUtil.h>

#include <cstring>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sim/note.h"
#include "sim/runtime.h"
#include "sim/tracker.h"
#include "sim/transfer.h"

namespace tdcopier::sim {

namespace {

// A RowMove that lasts until its operation runs.
struct Moves {
  std::vector<RowTableMove> tables;
  std::vector<std::int64_t> numbers;  // empty: on the device
  const std::uint32_t* on_device;
  std::size_t count;
  bool scatter;

  std::int64_t number(std::size_t place) const {
    return numbers.empty() ? on_device[place] : numbers[place];
  }

  // Calls visit(from, to, bytes) for each row that is named.
  template <typename Visit>
  void each(const Visit& visit) const {
    for (const RowTableMove& table : tables) {
      const auto bytes = table.row_bytes();
      for (std::size_t place = 0; place < count; ++place) {
        const auto row = number(place);
        if (row == kNoRow) continue;
        auto* const there = reinterpret_cast<char*>(table.rows) + row * table.stride_bytes;
        auto* const here = reinterpret_cast<char*>(table.values) + place * bytes;
        visit(scatter ? here : there, scatter ? there : here, bytes);
      }
    }
  }
};

void check_pinned(Access& rows) {
  if (rows.on_host && rows.block == 0) rows.misuse = "host memory that is not pinned";
}

// The rows that are known when the move is enqueued, and the contiguous memory of all.
std::shared_ptr<Note> note_of_move(const std::string& label, const Moves& moves) {
  auto note = std::make_shared<Note>();
  note->label = label;
  if (moves.numbers.empty()) {
    note->accesses.push_back(
        sim::access_to(moves.on_device, moves.count * sizeof(std::uint32_t), /*writes=*/false));
  }
  for (const RowTableMove& table : moves.tables) {
    const auto* const values = reinterpret_cast<const void*>(table.values);
    note->accesses.push_back(
        sim::access_to(values, table.row_bytes() * moves.count, !moves.scatter));
    const auto* const rows = reinterpret_cast<const char*>(table.rows);
    if (moves.numbers.empty())
      check_pinned(note->accesses.emplace_back(sim::access_to(rows, 1, false)));
    for (const auto row : moves.numbers) {
      const auto* const address = rows + row * table.stride_bytes;
      note->accesses.push_back(sim::access_to(address, table.row_bytes(), moves.scatter));
      check_pinned(note->accesses.back());
    }
  }
  return note;
}

std::function<void()> watched(std::function<void()> move, const Note& note,
                              const StreamQueue& queue) {
  for (const Access& access : note.accesses) {
    if (!access.on_host || access.writes) continue;
    move = Tracker::get().watch(std::move(move), access, note.label + " on " + queue.name());
  }
  return move;
}

}  // namespace

void move_rows(const c10::Stream& stream, const RowMove& move) {
  auto moves = std::make_shared<Moves>();
  moves->tables.assign(move.tables, move.tables + move.table_count);
  if (move.numbers != nullptr)
    moves->numbers.assign(move.numbers, move.numbers + move.number_count);
  moves->on_device = move.numbers_on_device;
  moves->count = move.number_count;
  moves->scatter = move.scatter;
  std::size_t bytes = 0;
  for (const RowTableMove& table : moves->tables) bytes += table.row_bytes() * moves->count;
  const auto index = stream.device().index();
  const Transfer transfer = move.scatter
                                ? Transfer{Direction::kDeviceToHost, bytes, index, std::nullopt}
                                : Transfer{Direction::kHostToDevice, bytes, std::nullopt, index};
  std::function<void()> run = [moves] {
    moves->each([](const char* from, char* to, std::size_t row) { std::memcpy(to, from, row); });
  };
  auto& queue = queue_of(stream);
  std::shared_ptr<Note> note;
  if (Tracker::is_on()) {
    note = note_of_move(describe(transfer), *moves);
    run = watched(std::move(run), *note, queue);
  }
  Operation operation = begin_transfer(transfer, std::move(run));
  operation.note = std::move(note);
  queue.enqueue(std::move(operation));
}

void number_rows(const c10::Stream& stream, const RowNumbering& numbering) {
  const auto given = [numbering](std::uint32_t place) -> std::int64_t {
    const auto* const at =
        static_cast<const char*>(numbering.index) + place * numbering.number_bytes;
    if (numbering.number_bytes == 8) return *reinterpret_cast<const std::int64_t*>(at);
    if (numbering.number_bytes == 4) return *reinterpret_cast<const std::int32_t*>(at);
    return *reinterpret_cast<const std::int16_t*>(at);
  };
  Operation operation{"kernel", [numbering, given] {
                        std::unordered_map<std::uint32_t, std::uint32_t> last;
                        bool is_bad = false;
                        for (std::uint32_t place = 0; place < numbering.count; ++place) {
                          const auto number = given(place);
                          const auto row = number < 0 ? number + numbering.rows : number;
                          const bool is_row = row >= 0 && row < numbering.rows;
                          numbering.numbers[place] =
                              is_row ? static_cast<std::uint32_t>(row) : kNoRow;
                          if (is_row) last[static_cast<std::uint32_t>(row)] = place;
                          if (is_row || is_bad) continue;
                          is_bad = true;
                          numbering.bad->number = number;
                          numbering.bad->place = std::uint64_t{place} + 1;
                        }
                        for (std::uint32_t place = 0;
                             numbering.last != nullptr && place < numbering.count; ++place) {
                          auto& row = numbering.numbers[place];
                          if (row != kNoRow && last[row] != place) row = kNoRow;
                        }
                      }};
  if (Tracker::is_on()) {
    const std::size_t count = numbering.count;
    operation.note =
        note_of(c10::str("the kernel that numbers ", count, " rows"),
                sim::access_to(numbering.index, count * numbering.number_bytes, false),
                sim::access_to(numbering.numbers, count * sizeof(std::uint32_t), true));
  }
  queue_of(stream).enqueue(std::move(operation));
}

}  // namespace tdcopier::sim
