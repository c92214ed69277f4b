// Copies many segments between their places on a device and their slots in up to eight chunks in
// one launch: a gather or a scatter. tools/make_ptx.py compiles this file to move_segments_ptx.h.
// engine/moves/segment_kernel.h repeats the layout of the parameters.

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kMostChunks = 8;
constexpr u32 kBytesBits = 24;

struct Segment {
  u64 address;
  u32 offset;           // of its slot in its chunk
  u32 chunk_and_bytes;  // the chunk's number in the upper 8 bits
};

template <u32 kMost>
struct Segments {
  u64 chunks[kMostChunks];  // addresses; host addresses for pinned chunks
  u32 scatter;
  u32 unused;
  Segment each[kMost];
};

// Copies in words. Requires: both addresses are aligned to Word, since a device reads and writes
// whole aligned elements.
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
  const u64 chunk = segments.chunks[segment.chunk_and_bytes >> kBytesBits];
  const u32 bytes = segment.chunk_and_bytes & ((1u << kBytesBits) - 1);
  char* const slot = reinterpret_cast<char*>(chunk + segment.offset);
  char* const leaf = reinterpret_cast<char*>(segment.address);
  const char* const from = segments.scatter ? slot : leaf;
  char* const to = segments.scatter ? leaf : slot;
  const u64 either = reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to);
  if (either % 16 == 0) return copy_as<uint4>(from, to, bytes);
  if (either % 8 == 0) return copy_as<u64>(from, to, bytes);
  if (either % 4 == 0) return copy_as<u32>(from, to, bytes);
  if (either % 2 == 0) return copy_as<unsigned short>(from, to, bytes);
  copy_as<char>(from, to, bytes);
}

// A launch copies all parameters, so there are smaller sizes for small batches. The largest nearly
// fills the 32,764 bytes that a kernel may have.
extern "C" __global__ void move_segments_254(const __grid_constant__ Segments<254> segments) {
  move(segments);
}
extern "C" __global__ void move_segments_766(const __grid_constant__ Segments<766> segments) {
  move(segments);
}
extern "C" __global__ void move_segments_2042(const __grid_constant__ Segments<2042> segments) {
  move(segments);
}
