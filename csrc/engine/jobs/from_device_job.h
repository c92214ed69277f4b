// D2H to new memory, and D2D to new or existing memory, on another device or the same. Reads after
// the caller's work on the sources' device; engine/device/accelerator.h chooses the streams.
// Bytes on the host may be read after CopyJob::wait_done().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/jobs/copy_job.h"

namespace tdcopier {

// Chunks [first, last) that are moved together.
struct ChunkRange {
  enum class By : uint8_t {
    kTransfer,  // one contiguous leaf, from where it is
    kKernel,    // gathered straight into the result: within the device, or by a kernel into pinned
                // memory or a peer's
    kScratch,   // gathered on the device, then transferred one by one
  };

  size_t first;
  size_t last;
  By by;
};

// A copy from a device. It reads the sources after the work that their device's current stream has
// when the job is created, and writes destinations after the work that their device's has. A copy
// within one device into existing memory makes no transfers.
class FromDeviceJob final : public CopyJob {
 public:
  // `pinned`: results on the host are in pinned memory. `ranges`: all chunks that have bytes; none
  // for a copy within one device into existing memory. Thread: the caller's, because its current
  // streams are used.
  FromDeviceJob(Accelerator& source, c10::Device target, CopyWork work, bool pinned,
                std::vector<ChunkRange> ranges);

  size_t chunks() const override { return within_ && ranges_.empty() ? 0 : CopyJob::chunks(); }

 private:
  void transfer_all() override;
  void transfer_ranges();
  void gather_and_transfer(size_t first, size_t last);
  void gather_straight(size_t first, size_t last);
  void note_gathered(size_t last);
  void note_written(size_t first, size_t last);  // chunks of a result on the host
  // A chunk, and where its bytes are on the source device.
  struct ChunkAt {
    size_t chunk;
    const std::byte* from;
  };
  void transfer(std::span<const ChunkAt> chunks);
  void transfer_to_host(std::span<const ChunkAt> chunks);
  void transfer_between(std::span<const ChunkAt> chunks);
  void transfer_through_scratch(const ChunkAt& chunk);
  // Let the stream of the reads, which makes the transfers between two devices, write what belongs
  // to the target's stream, and this one go on after them. Not before a gather to the sources' own
  // device: it need not wait for the target.
  void let_read_stream_write();
  void join_read_stream();

  Accelerator& source_;
  const bool pinned_;
  const std::vector<ChunkRange> ranges_;
  const bool within_;                  // within one device
  const bool between_;                 // between two
  bool may_write_ = false;             // the stream of the reads, what the target's has now
  const EventRef sources_ready_;       // after the caller's work on the sources
  const EventRef destinations_ready_;  // after its work on the destinations; null: new memory
};

}  // namespace tdcopier
