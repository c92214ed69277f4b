// Compares the version in torch's headers with that of the imported package.
#include "python/runtime/torch_version.h"

#include <pybind11/pybind11.h>
#include <torch/version.h>

#include <cctype>
#include <string>
#include <string_view>

namespace py = pybind11;

namespace tdcopier {
namespace {

#define TDCOPIER_TEXT_OF(number) #number
#define TDCOPIER_MINOR(major, minor) TDCOPIER_TEXT_OF(major) "." TDCOPIER_TEXT_OF(minor)
constexpr std::string_view kMinor = TDCOPIER_MINOR(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);

// tdcopier/_native.py looks for this text in the file of a module that cannot be loaded.
[[gnu::used]] constexpr char kBuiltFor[] =
    "tdcopier is built for torch " TDCOPIER_MINOR(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);

// Whether "2.13.0+cpu" or "2.13.0a0+git" is of the minor version "2.13".
bool is_of(std::string_view version, std::string_view minor) {
  if (version.substr(0, minor.size()) != minor) return false;
  const std::string_view rest = version.substr(minor.size());
  return rest.empty() || !std::isdigit(static_cast<unsigned char>(rest.front()));
}

}  // namespace

void check_torch_version() {
  const auto found = py::module_::import("torch").attr("__version__").cast<std::string>();
  if (!is_of(found, kMinor)) throw py::import_error(kBuiltFor);
}

}  // namespace tdcopier
