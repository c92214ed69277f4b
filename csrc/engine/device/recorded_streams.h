// Tells torch's allocators which streams use memory, and keeps forked children from giving such
// memory back: the allocator would record an event on those streams, which ends a child.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

namespace tdcopier {

// Ensures that the memory, which is on the stream's device, is not reused while the work that is
// enqueued on the stream when the memory is dropped may still use it. A forked child that drops it
// leaves it to its parent. Thread: any. GIL: either way.
void record_stream(const c10::Storage& memory, const c10::Stream& stream);

// The same for memory of torch's pinned allocator. Memory of others is left alone.
void record_stream_on_pinned(const c10::Storage& memory, const c10::Stream& stream);

// Ensures only that a forked child that drops the memory leaves it to its parent, for memory on
// which streams have been recorded already. `deleter`: of that memory, by which it is told from
// other memory that the storage may be given later, such as shared memory.
void leave_to_parent(const c10::Storage& memory, c10::DeleterFnPtr deleter);

}  // namespace tdcopier
