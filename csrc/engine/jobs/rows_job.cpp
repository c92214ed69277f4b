// Numbers rows on the device, and lets it move them.
#include "engine/jobs/rows_job.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <bit>
#include <utility>

#include "base/interleaver.h"
#include "base/internal_error.h"
#include "engine/device/events.h"
#include "engine/device/recorded_streams.h"

namespace tdcopier {
namespace {

bool is_scatter(const CopyWork& work) {
  return work.destinations.size() != 0 && work.destinations[0].is_rows();
}

// Returns the stream for a job of the calling thread.
const c10::Stream& stream_for(Accelerator& device, const CopyWork& work) {
  if (is_scatter(work)) return device.from_device_stream();
  if (work.result && !rows_of(work).on_device) return device.to_device_stream();
  return device.ordered_stream();
}

// Numbers the rows on the current stream. Returns the numbers; none if they are on the host.
c10::Storage number_rows(c10::Device device, const CopyWork& work, BadRowWatch* watch) {
  const RowIndex& index = rows_of(work);
  if (!index.on_device || index.count() == 0) return {};
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const auto count = static_cast<uint32_t>(index.count());
  c10::Storage numbers = allocate_on_device(device, count * sizeof(uint32_t));
  RowNumbering numbering{index.on_device->data,
                         index.on_device->number_bytes,
                         count,
                         index.table_rows,
                         static_cast<uint32_t*>(numbers.mutable_data()),
                         watch->report(),
                         nullptr,
                         0};
  c10::Storage last;  // freed in the order of the stream
  if (is_scatter(work)) {
    const uint64_t entries = std::bit_ceil(uint64_t{2} * count);
    last = allocate_on_device(device, entries * sizeof(uint64_t));
    numbering.last = static_cast<uint64_t*>(last.mutable_data());
    numbering.last_mask = static_cast<uint32_t>(entries - 1);
  }
  row_kernels(device)->number(stream, numbering);
  return numbers;
}

// Returns what is to be moved. `numbers`: of number_rows().
RowMoves moves_of(const CopyWork& work, const c10::Storage& numbers) {
  const RowIndex& index = rows_of(work);
  const auto* const on_device = numbers ? static_cast<const uint32_t*>(numbers.data()) : nullptr;
  RowMoves moves = index.on_device ? RowMoves(on_device, index.count()) : RowMoves(index.rows);
  const LeafTable& leaves = *work.leaves;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const Leaf& leaf = leaves[i];
    const auto* const data = static_cast<const std::byte*>(leaf.data);
    if (leaf.bytes == 0) continue;
    if (is_scatter(work)) {
      const Destination& table = work.destinations[i];
      moves.add(table.data, work.destinations.row_table(table).layout, data);
    } else if (work.result) {
      const Slot& slot = work.plan->slots[i];
      const RowLayout layout = leaf.is_rows() ? leaves.row_layout(leaf) : RowLayout{0, leaf.bytes};
      moves.add(data, layout, work.result->address(slot.chunk) + slot.offset);
    } else {
      moves.add(data, leaves.row_layout(leaf), work.destinations[i].data);
    }
  }
  return moves;
}

std::shared_ptr<BadRowWatch> watch_for(c10::Device device, const CopyWork& work) {
  const RowIndex& index = rows_of(work);
  if (!index.on_device || index.count() == 0) return nullptr;
  return std::make_shared<BadRowWatch>(device, index.table_rows);
}

}  // namespace

const RowIndex& rows_of(const CopyWork& work) {
  static const RowIndex whole_leaves{{0}, {}, 0};  // a leaf that is no rows is row 0 of a table
  const auto& index = is_scatter(work) ? work.destinations.row_index() : work.leaves->row_index();
  return index != nullptr ? *index : whole_leaves;
}

RowsJob::RowsJob(Accelerator& device, c10::Device target, CopyWork work)
    : CopyJob(device, stream_for(device, work), &stream_for(device, work), target, std::move(work)),
      watch_(watch_for(device.device(), work_)),
      numbers_(number_rows(device.device(), work_, watch_.get())) {
  if (numbers_) record_stream(numbers_, stream_);
  if (stream_ != device.to_device_stream()) device.record_current()->block(stream_);
}

RowsJob::~RowsJob() {
  if (!watch_ || watch_->has_end()) return;
  watch_->is_of_failure();
  watch_->ends_with(last_write());
}

uint32_t RowsJob::rows_in_place() const {
  uint32_t count = 0;
  for (size_t i = 0; i < leaves_.size(); ++i) count += leaves_[i].bytes != 0;
  return count;
}

void RowsJob::transfer_all() {
  interleave();
  const PhaseRange range(phases_, Phase::kEnqueue);
  const c10::StreamGuard on_stream(stream_);
  const RowMoves moves = moves_of(work_, numbers_);
  const size_t launches =
      moves.enqueue(*row_kernels(accelerator_.device()), stream_, is_scatter(work_));
  // Each kernel counts as one transfer.
  for (size_t i = 0; i < launches; ++i) count_transfer(i == 0 ? moves.bytes() : 0);
  arrived_ = accelerator_.events().record_or_wait(stream_);
  if (watch_) watch_->ends_with(arrived_);
}

void RowsJob::check_numbers() const {
  if (watch_) watch_->raise_if_bad();
}

std::shared_ptr<BadRowWatch> RowsJob::capture(c10::Device device, const CopyWork& work) {
  std::shared_ptr<BadRowWatch> watch = watch_for(device, work);
  const c10::Storage numbers = number_rows(device, work, watch.get());
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (watch) watch->is_replayed();
  moves_of(work, numbers).enqueue(*row_kernels(device), stream, is_scatter(work));
  return watch;
}

}  // namespace tdcopier
