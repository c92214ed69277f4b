// Gives back what a device still uses, when it does so no more.
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "engine/copy_job.h"
#include "engine/event_pool.h"

namespace tdcopier {

// Waits for the event and gives back, on the reclaimer's thread; or here, where that has ended.
void give_back_behind(EventRef event, std::shared_ptr<SourceHold> hold,
                      ThreadPool& reclaimer) noexcept;

}  // namespace tdcopier
