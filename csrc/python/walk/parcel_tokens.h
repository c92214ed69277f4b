// What the bytes of a layout mean: one says what follows, a node of the tree and then its children,
// or a value, for example the key of a dict.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/version.h>

#include <array>
#include <cstdint>

namespace tdcopier {

enum class ParcelToken : uint8_t {
  // Nodes:
  kList,         // number of children, children
  kTuple,        // as kList
  kDict,         // number of children, then a key and a child for each
  kCustom,       // number of children, function that builds it, its context, children
  kRebuilt,      // number of children, module, class, a value, children; see Hooks::packed_form
  kTensorDict,   // batch size, names, locked, then as kDict
  kTensorClass,  // class, other fields, its TensorDict
  kLeaf,         // dtype, number of dimensions, sizes
  kPermuted,     // a leaf in another order of dimensions: as kLeaf, then strides in elements
  kValue,        // a value
  // Values:
  kNone,
  kFalse,
  kTrue,
  kInteger,  // a signed number
  kFloat,    // 8 bytes, IEEE 754
  kText,     // number of bytes, UTF-8; later uses of the same text are kAgain
  kAgain,    // the index of a text among all texts
  kTupleOf,  // number of items, values
  kSizes,    // a torch.Size: number of sizes, sizes
  kBytes,    // number of bytes, bytes
  kPickled,  // its index in the pickled list
  kLast = kPickled,
};

// The codes of dtypes. New ones are added at the end.
inline constexpr std::array kParcelDtypes = {
    c10::ScalarType::Byte,
    c10::ScalarType::Char,
    c10::ScalarType::Short,
    c10::ScalarType::Int,
    c10::ScalarType::Long,
    c10::ScalarType::Half,
    c10::ScalarType::Float,
    c10::ScalarType::Double,
    c10::ScalarType::ComplexHalf,
    c10::ScalarType::ComplexFloat,
    c10::ScalarType::ComplexDouble,
    c10::ScalarType::Bool,
    c10::ScalarType::BFloat16,
    c10::ScalarType::Float8_e5m2,
    c10::ScalarType::Float8_e4m3fn,
    c10::ScalarType::Float8_e5m2fnuz,
    c10::ScalarType::Float8_e4m3fnuz,
    c10::ScalarType::UInt16,
    c10::ScalarType::UInt32,
    c10::ScalarType::UInt64,
    c10::ScalarType::Float8_e8m0fnu,
    c10::ScalarType::Float4_e2m1fn_x2,
    c10::ScalarType::Bits1x8,
    c10::ScalarType::Bits2x4,
    c10::ScalarType::Bits4x2,
    c10::ScalarType::Bits8,
    c10::ScalarType::Bits16,
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
    c10::ScalarType::BComplex32,  // an older torch refuses it as unknown
#endif
    // Codes are places: the next dtype comes after this one, which an older torch has to leave out.
};

}  // namespace tdcopier
