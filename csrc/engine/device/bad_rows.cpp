// Keeps the reports of all devices in pages of pinned memory, which are never freed.
#include "engine/device/bad_rows.h"

#include <ATen/core/CachingHostAllocator.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/device/graph_capture.h"

namespace tdcopier {
namespace {

constexpr size_t kReportsOfPage = 256;

struct Dropped {
  BadRow* report;
  int64_t rows;
  EventRef end;  // null: the device may write at any time
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

void add_page(c10::DeviceType type) {
  const RelaxedCapture relaxed(type);
  c10::DataPtr page = at::getHostAllocator(type)->allocate(kReportsOfPage * sizeof(BadRow));
  auto* const first = static_cast<BadRow*>(page.get());
  for (size_t i = 0; i < kReportsOfPage; ++i) reports().idle.emplace_back(type, first + i);
  reports().pages.push_back(std::move(page));
}

BadRow* take_report(c10::DeviceType type) {
  Reports& all = reports();
  const std::lock_guard lock(all.mutex);
  const auto of_type = [type](const auto& idle) { return idle.first == type; };
  auto found = std::ranges::find_if(all.idle, of_type);
  if (found == all.idle.end()) {
    add_page(type);
    found = std::ranges::find_if(all.idle, of_type);
  }
  BadRow* const report = found->second;
  all.in_use.push_back(*found);
  all.idle.erase(found);
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
  return std::out_of_range("index " + std::to_string(report.number) +
                           " is out of bounds: there are " + std::to_string(rows) +
                           " rows (found by the device, at place " +
                           std::to_string(report.place - 1) + " of the index)");
}

}  // namespace

BadRowWatch::BadRowWatch(c10::Device device, int64_t rows)
    : report_(take_report(device.type())), rows_(rows) {}

BadRowWatch::~BadRowWatch() {
  Reports& all = reports();
  const std::lock_guard lock(all.mutex);
  if (end_ != nullptr && raised_) {
    give_back(report_);
    return;
  }
  all.dropped.push_back({report_, rows_, std::move(end_)});
  all.any_dropped = true;
}

void BadRowWatch::raise_if_bad() {
  if (report_->place == 0) return;
  const std::out_of_range error = error_of(*report_, rows_);
  if (end_ == nullptr) report_->place = 0;  // the next replay reports its own numbers
  raised_ = true;
  throw error;
}

void BadRowWatch::raise_of_dropped() {
  Reports& all = reports();
  if (!all.any_dropped) return;
  const std::lock_guard lock(all.mutex);
  for (size_t i = 0; i < all.dropped.size();) {
    Dropped& dropped = all.dropped[i];
    const bool writes_no_more = dropped.end != nullptr && has_ended(*dropped.end);
    const bool is_bad = dropped.report->place != 0;
    const auto error =
        is_bad ? std::optional(error_of(*dropped.report, dropped.rows)) : std::nullopt;
    if (is_bad) dropped.report->place = 0;
    if (writes_no_more) {
      give_back(dropped.report);
      dropped = std::move(all.dropped.back());
      all.dropped.pop_back();
    } else {
      ++i;
    }
    if (error) throw *error;
  }
  all.any_dropped = !all.dropped.empty();
}

}  // namespace tdcopier
