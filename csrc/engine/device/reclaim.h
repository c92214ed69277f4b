// Keeps resources, for example sources on a device, until the device has finished using them. The
// memory of a dropped result belongs to torch's allocator, which engine/leaves/result.h tells of
// its uses. Host sources are kept by python/walk/sources.h, and released as soon as they were read,
// by CopyJob::note_sources_free().
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>

#include "base/monitor.h"
#include "engine/device/events.h"

namespace tdcopier {

// A keep-alive for the memory that a job reads or writes, for example of Python objects. The engine
// releases it as soon as the bytes have been read, or written.
class KeepAlive {
 public:
  virtual ~KeepAlive() = default;
  // Releases the memory. A second call does nothing. Thread: any. GIL: may or may not be held; must
  // not wait for it.
  virtual void release() noexcept = 0;
  virtual bool is_released() const noexcept = 0;
};

// Releases keep-alives of all devices once their events have ended. Calls poll the events, and so
// does one thread, from time to time while any are pending. Thread: any. Lifetime: never destroyed.
class Reclaimer {
 public:
  static Reclaimer& get();

  void release_after(EventRef event, std::shared_ptr<KeepAlive> kept) noexcept;

  // Releases what devices have finished with. Returns whether anything is still pending.
  bool look() noexcept;
  // Waits until a device has finished with the oldest keep-alive, and releases it. Returns false if
  // nothing is pending. Blocks: for that. GIL: must not be held. Throws: Interrupted.
  bool wait_for_oldest();

  // Sets whether the thread stays for a while when nothing is left, as it does at first. Without,
  // it leaves at once, also from a pause.
  void set_stays(bool stays) noexcept;

 private:
  struct Pending {
    EventRef event;
    std::shared_ptr<KeepAlive> kept;
  };

  void look_while_needed() noexcept;  // on the reclaimer's thread
  // Returns null if nothing is pending; then `stays` says whether the thread looks again. `ends`:
  // it takes no new entries, whose callers wait instead.
  EventRef oldest(bool stays, bool ends);
  // Returns false, at once, if the thread is not to stay.
  bool pause_while_idle();

  Mutex mutex_;
  std::list<Pending> pending_;  // guarded by mutex_
  bool thread_looks_ = false;   // guarded by mutex_

  // No part of a schedule, in which the thread does not stay.
  std::mutex stay_mutex_;
  std::condition_variable leaves_;
  bool stays_ = true;  // guarded by stay_mutex_
};

}  // namespace tdcopier
