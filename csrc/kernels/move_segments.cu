// Copies many segments between where they lie on a device and their slots in one piece of memory,
// all at once: a gather, or a scatter. This is the source of move_segments_ptx.h, which
// tools/make_ptx.py writes; engine/segment_kernel.h has the layout of the parameters once more.

using u32 = unsigned int;
using u64 = unsigned long long;

struct Segment {
  u64 address;
  u32 offset;  // of its slot
  u32 bytes;
};

template <u32 kMost>
struct Segments {
  u64 memory;  // that the slots are in; the host's if it is pinned
  u32 scatter;
  u32 unused;
  Segment each[kMost];
};

// As wide as both addresses allow: a device reads and writes whole elements, where they are
// aligned.
template <typename Word>
__device__ void copy_as(const char* __restrict__ from, char* __restrict__ to, u32 bytes) {
  const u32 words = bytes / sizeof(Word);
  const Word* __restrict__ source = reinterpret_cast<const Word*>(from);
  Word* __restrict__ target = reinterpret_cast<Word*>(to);
#pragma unroll 4
  for (u32 i = threadIdx.x; i < words; i += blockDim.x) target[i] = source[i];
  for (u32 i = words * sizeof(Word) + threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

template <u32 kMost>
__device__ void move(const Segments<kMost>& segments) {
  const Segment segment = segments.each[blockIdx.x];
  char* const slot = reinterpret_cast<char*>(segments.memory + segment.offset);
  char* const leaf = reinterpret_cast<char*>(segment.address);
  const char* const from = segments.scatter ? slot : leaf;
  char* const to = segments.scatter ? leaf : slot;
  const u64 either = reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to);
  if (either % 16 == 0) return copy_as<uint4>(from, to, segment.bytes);
  if (either % 8 == 0) return copy_as<u64>(from, to, segment.bytes);
  if (either % 4 == 0) return copy_as<u32>(from, to, segment.bytes);
  if (either % 2 == 0) return copy_as<unsigned short>(from, to, segment.bytes);
  copy_as<char>(from, to, segment.bytes);
}

// Parameters are copied whole at each launch, so there is a size for small batches. Those of the
// largest fill what a kernel may have: 32,764 bytes.
extern "C" __global__ void move_segments_254(const __grid_constant__ Segments<254> segments) {
  move(segments);
}
extern "C" __global__ void move_segments_766(const __grid_constant__ Segments<766> segments) {
  move(segments);
}
extern "C" __global__ void move_segments_2046(const __grid_constant__ Segments<2046> segments) {
  move(segments);
}
