// Each message says where, what was found, and what to do.
#include "python/pair_mistakes.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/DynamicTypes.h>

#include <stdexcept>
#include <string_view>

#include "python/pair_walk.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

std::string shape_text(at::IntArrayRef sizes) {
  std::string text = "(";
  for (size_t d = 0; d < sizes.size(); ++d) {
    text += (d != 0 ? ", " : "") + std::to_string(sizes[d]);
  }
  return text + (sizes.size() == 1 ? ",)" : ")");
}

std::string dtype_text(c10::ScalarType dtype) {
  return py::str(py::handle(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype))));
}

}  // namespace

std::string PairMistakes::path(size_t number, const char* tree) const {
  const std::string name = std::string_view(tree) == "source" ? names_.source : names_.destination;
  const auto steps = path_of_pair(source_, destination_, number);
  return steps ? name + *steps : "a leaf of " + name;
}

void PairMistakes::refuse(size_t number, const char* tree, const std::string& why) const {
  throw py::value_error(path(number, tree) + why);
}

void PairMistakes::refuse_both(size_t number, const std::string& source,
                               const std::string& destination) const {
  throw py::value_error(path(number, "source") + source + ", but " + path(number, "destination") +
                        destination);
}

void PairMistakes::refuse_shapes(size_t number, at::IntArrayRef source,
                                 at::IntArrayRef destination) const {
  refuse_both(number, " has shape " + shape_text(source),
              " has shape " + shape_text(destination) + ": both must have the same");
}

void PairMistakes::refuse_dtypes(size_t number, c10::ScalarType source,
                                 c10::ScalarType destination) const {
  refuse_both(number, " has dtype " + dtype_text(source),
              " has dtype " + dtype_text(destination) +
                  ": both must have the same; convert one with to() first");
}

void PairMistakes::refuse_sharing(const PairEnd& first, const PairEnd& second) const {
  throw py::value_error(path(first.number, first.tree) + " and " +
                        path(second.number, second.tree) +
                        " share memory: what is written must not be read or written for another "
                        "leaf; give a clone() of one");
}

void PairMistakes::check_writable(size_t number, const at::Tensor& tensor) const {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->autograd_meta() != nullptr && c10::GradMode::is_enabled() && impl->requires_grad()) {
    refuse(number, "destination",
           " requires a gradient, and writing in place would break it: make the call within "
           "torch.no_grad(), or give detach()");
  }
  if (impl->is_inference() && !c10::InferenceMode::is_enabled()) {
    throw std::runtime_error(path(number, "destination") +
                             " was made in inference mode, where alone it may be written in "
                             "place: make the call there, or give a clone()");
  }
}

void PairMistakes::check_storage(size_t number, const PlainTensor& plain, const at::Tensor& tensor,
                                 const char* tree) const {
  if (plain.packable != Packable::kShortStorage) return;
  refuse(number, tree,
         " reaches beyond its storage, which has only " +
             std::to_string(tensor.storage().nbytes()) +
             " bytes (was it shrunk with untyped_storage().resize_()?)");
}

}  // namespace tdcopier
