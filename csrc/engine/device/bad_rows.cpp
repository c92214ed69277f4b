// Keeps the reports of all devices in pages of pinned memory, which are never freed.
#include "engine/device/bad_rows.h"

#include <ATen/core/CachingHostAllocator.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/forks.h"
#include "engine/device/graph_capture.h"

namespace tdcopier {
namespace {

constexpr size_t kReportsOfPage = 256;
constexpr size_t kLookedAt = 256;  // of captured copies, in one call

struct Idle {
  c10::DeviceType type;
  BadRow* report;
};

// Of a copy whose handle was dropped.
struct Dropped {
  Idle freed;  // when the copy has ended
  int64_t rows;
  EventRef end;
  bool raised;
};

// Of a captured copy whose handle was dropped. torch does not tell when a graph is gone, so the
// device may write at any time.
struct OfGraph {
  BadRow* report;
  int64_t rows;
};

struct Reports {
  std::mutex mutex;
  std::vector<Idle> idle;
  std::vector<c10::DataPtr> pages;
  std::vector<Dropped> dropped;
  std::vector<OfGraph> of_graphs;
  size_t next_of_graphs = 0;  // the one to look at next
  std::atomic<bool> any_dropped = false;
};

// Never destroyed: devices may write at any time.
Reports& reports() {
  static auto* const made = new Reports;
  return *made;
}

// Returns a report that is not in use; null if there is none.
BadRow* take_idle(c10::DeviceType type) {
  Reports& all = reports();
  const std::lock_guard lock(all.mutex);
  const auto found = std::ranges::find(all.idle, type, &Idle::type);
  if (found == all.idle.end()) return nullptr;
  BadRow* const report = found->report;
  *found = all.idle.back();
  all.idle.pop_back();
  return report;
}

void add_page(c10::DeviceType type) {
  const RelaxedCapture relaxed(type);
  c10::DataPtr page = at::getHostAllocator(type)->allocate(kReportsOfPage * sizeof(BadRow));
  auto* const first = static_cast<BadRow*>(page.get());
  const std::lock_guard lock(reports().mutex);
  for (size_t i = 0; i < kReportsOfPage; ++i) reports().idle.push_back({type, first + i});
  reports().pages.push_back(std::move(page));
}

BadRow* take_report(c10::DeviceType type) {
  BadRow* report = take_idle(type);
  while (report == nullptr) {  // another thread may take those of a new page
    add_page(type);
    report = take_idle(type);
  }
  report->place = 0;
  return report;
}

std::out_of_range error_of(const BadRow& report, int64_t rows) {
  return std::out_of_range("index " + std::to_string(report.number) + " is out of bounds: there " +
                           counted_rows(rows) + " (found by the device, at place " +
                           std::to_string(report.place - 1) + " of the index)");
}

// Looks at some reports of captured copies, so that a program which captures ten thousand graphs
// pays no more for each gather than one which captures a few hundred. Requires: the mutex is held.
std::optional<std::out_of_range> error_of_graphs(Reports& all) {
  const size_t looked_at = std::min(all.of_graphs.size(), kLookedAt);
  for (size_t i = 0; i < looked_at; ++i) {
    const OfGraph& each = all.of_graphs[all.next_of_graphs++ % all.of_graphs.size()];
    if (each.report->place == 0) continue;
    std::out_of_range error = error_of(*each.report, each.rows);
    each.report->place = 0;  // the next replay reports its own numbers
    return error;
  }
  return std::nullopt;
}

}  // namespace

std::string counted_rows(int64_t rows) {
  return rows == 1 ? "is 1 row" : "are " + std::to_string(rows) + " rows";
}

BadRowWatch::BadRowWatch(c10::Device device, int64_t rows)
    : type_(device.type()), report_(take_report(type_)), rows_(rows) {}

void BadRowWatch::ends_with(EventRef end) {
  use_ = Use::kUntilEvent;
  end_ = std::move(end);
}

BadRowWatch::~BadRowWatch() {
  if (use_ == Use::kUnknown) return;
  Reports& all = reports();
  const std::lock_guard lock(all.mutex);
  if (use_ == Use::kByGraph) {
    all.of_graphs.push_back({report_, rows_});
  } else {
    all.dropped.push_back({{type_, report_}, rows_, std::move(end_), raised_});
  }
  all.any_dropped = true;
}

void BadRowWatch::raise_if_bad() {
  if (report_->place == 0) return;
  const std::out_of_range error = error_of(*report_, rows_);
  if (use_ == Use::kByGraph) report_->place = 0;  // the next replay reports its own numbers
  raised_ = true;
  throw error;
}

void BadRowWatch::raise_of_dropped() {
  Reports& all = reports();
  if (!all.any_dropped || fork_generation() != 0) return;
  std::vector<Dropped> dropped;
  {
    const std::lock_guard lock(all.mutex);
    dropped.swap(all.dropped);
  }
  // Without the mutex, because this asks the device.
  std::optional<std::out_of_range> error;
  std::vector<Idle> idle;
  std::erase_if(dropped, [&](Dropped& each) {
    if (each.end != nullptr && !has_ended(*each.end)) return false;
    BadRow& report = *each.freed.report;
    if (report.place != 0 && error) return false;  // for the next call
    if (report.place != 0 && !each.raised) error = error_of(report, each.rows);
    idle.push_back(each.freed);
    return true;
  });
  {
    const std::lock_guard lock(all.mutex);
    all.idle.insert(all.idle.end(), idle.begin(), idle.end());
    for (Dropped& each : dropped) all.dropped.push_back(std::move(each));
    if (!error) error = error_of_graphs(all);
    all.any_dropped = !all.dropped.empty() || !all.of_graphs.empty();
  }
  if (error) throw *error;
}

}  // namespace tdcopier
