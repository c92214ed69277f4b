// A task of the reclaimer's for each event.
#include "engine/reclaim.h"

#include <utility>

namespace tdcopier {

void give_back_behind(EventRef event, std::shared_ptr<SourceHold> hold,
                      ThreadPool& reclaimer) noexcept {
  const auto reclaim = [read = std::move(event), kept = std::move(hold)]() noexcept {
    wait_until_ended(*read);
    kept->give_back();
  };
  try {
    if (reclaimer.submit(reclaim)) return;
  } catch (...) {  // no memory for the task: done here, below
  }
  reclaim();
}

}  // namespace tdcopier
