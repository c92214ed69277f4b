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

#include "base/fork_generation.h"
#include "engine/device/graph_capture.h"

namespace tdcopier {
namespace {

constexpr size_t kReportsOfPage = 256;

struct Dropped {
  BadRow* report;
  int64_t rows;
  EventRef end;
  bool by_graph;  // the device may write at any time
  bool raised;
};

struct Reports {
  std::mutex mutex;
  std::vector<std::pair<c10::DeviceType, BadRow*>> idle;
  std::vector<std::pair<c10::DeviceType, BadRow*>> in_use;
  std::vector<c10::DataPtr> pages;
  std::vector<Dropped> dropped;
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
  const auto found =
      std::ranges::find_if(all.idle, [type](const auto& idle) { return idle.first == type; });
  if (found == all.idle.end()) return nullptr;
  BadRow* const report = found->second;
  all.in_use.push_back(*found);
  all.idle.erase(found);
  return report;
}

void add_page(c10::DeviceType type) {
  const RelaxedCapture relaxed(type);
  c10::DataPtr page = at::getHostAllocator(type)->allocate(kReportsOfPage * sizeof(BadRow));
  auto* const first = static_cast<BadRow*>(page.get());
  const std::lock_guard lock(reports().mutex);
  for (size_t i = 0; i < kReportsOfPage; ++i) reports().idle.emplace_back(type, first + i);
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

// Requires: the mutex is held, and the device writes no more.
void give_back(BadRow* report) {
  Reports& all = reports();
  const auto found = std::ranges::find_if(
      all.in_use, [report](const auto& used) { return used.second == report; });
  all.idle.push_back(*found);
  all.in_use.erase(found);
}

std::out_of_range error_of(const BadRow& report, int64_t rows) {
  return std::out_of_range("index " + std::to_string(report.number) + " is out of bounds: there " +
                           counted_rows(rows) + " (found by the device, at place " +
                           std::to_string(report.place - 1) + " of the index)");
}

}  // namespace

std::string counted_rows(int64_t rows) {
  return rows == 1 ? "is 1 row" : "are " + std::to_string(rows) + " rows";
}

BadRowWatch::BadRowWatch(c10::Device device, int64_t rows)
    : report_(take_report(device.type())), rows_(rows) {}

void BadRowWatch::ends_with(EventRef end) {
  use_ = Use::kUntilEvent;
  end_ = std::move(end);
}

BadRowWatch::~BadRowWatch() {
  if (use_ == Use::kUnknown) return;
  Reports& all = reports();
  const std::lock_guard lock(all.mutex);
  all.dropped.push_back({report_, rows_, std::move(end_), use_ == Use::kByGraph, raised_});
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
  std::vector<BadRow*> idle;
  std::erase_if(dropped, [&](Dropped& each) {
    if (each.end != nullptr && !has_ended(*each.end)) return false;
    if (each.report->place != 0 && error) return false;  // for the next call
    const bool is_new = !each.raised || each.by_graph;
    if (each.report->place != 0 && is_new) error = error_of(*each.report, each.rows);
    each.report->place = 0;
    if (!each.by_graph) idle.push_back(each.report);
    return !each.by_graph;
  });
  {
    const std::lock_guard lock(all.mutex);
    for (BadRow* const report : idle) give_back(report);
    for (Dropped& each : dropped) all.dropped.push_back(std::move(each));
    all.any_dropped = !all.dropped.empty();
  }
  if (error) throw *error;
}

}  // namespace tdcopier
