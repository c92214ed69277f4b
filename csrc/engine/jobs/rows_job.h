// Pinned host memory that a device reads or writes itself, with a kernel: rows of tables, in a
// gather into its memory, new or existing, or in a scatter from there; or whole leaves of a copy,
// small ones that are pinned each for itself. python/walk/sort_leaves.cpp and
// python/walk/sort_pairs.cpp decide which leaves are moved so. The other jobs have the leaves that
// host threads move.
#pragma once

#include <c10/core/Storage.h>

#include <memory>
#include <optional>

#include "engine/device/bad_rows.h"
#include "engine/jobs/copy_job.h"
#include "engine/moves/row_kernel.h"

namespace tdcopier {

// Returns the selected rows of the work: of its leaves, or of its destinations. Whole leaves are
// tables of one row.
const RowIndex& rows_of(const CopyWork& work);

// One launch of the kernel moves all rows. Copies to new memory whose numbers are on the host wait
// for no caller's stream. All others wait for the work that the caller's current stream of the
// device has when the job is created. Numbers that are on the device are copied there, in the order
// of that stream; the host does not wait for them.
class RowsJob final : public CopyJob {
 public:
  // Requires: row_kernels() of the device. A PinnedRanges::Access protects the tables until run()
  // has returned.
  RowsJob(Accelerator& device, c10::Device target, CopyWork work);
  ~RowsJob() override;

  uint32_t rows_in_place() const override;
  bool waits_hold_for_reads() const override { return !rows_of(work_).on_device; }
  void check_numbers() const override;

  // Enqueues the moves on the current stream of the device, which is capturing a graph. Every
  // replay numbers and moves rows anew, at the same addresses. Requires: existing memory.
  static std::shared_ptr<BadRowWatch> capture(c10::Device device, const CopyWork& work);

 private:
  void transfer_all() override;

  const std::shared_ptr<BadRowWatch> watch_;  // null: the numbers are on the host
  c10::Storage numbers_;                      // none: they are on the host
};

}  // namespace tdcopier
