# Asks the interpreter where torch is installed, so that one recipe serves CPU-only and CUDA builds.
#
# `find_package(Torch)` is not used: with a CUDA build of torch it requires a full CUDA toolkit,
# although nothing here compiles device code.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "
import torch
from torch.utils import cpp_extension
print(torch.__version__)
print(';'.join(cpp_extension.include_paths()))
print(';'.join(cpp_extension.library_paths()))
print(int(torch._C._GLIBCXX_USE_CXX11_ABI))
"
  OUTPUT_VARIABLE torch_facts
  ERROR_VARIABLE torch_error
  RESULT_VARIABLE torch_status
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch_status EQUAL 0)
  message(FATAL_ERROR
    "tdcopier is compiled against the torch that it will run with, and ${Python_EXECUTABLE} has none.\n"
    "Install torch first, then build without isolation:\n"
    "  pip install torch && pip install --no-build-isolation tdcopier\n"
    "The interpreter said: ${torch_error}")
endif()

string(REGEX REPLACE "\n" "|" torch_facts "${torch_facts}")
string(REPLACE ";" "@" torch_facts "${torch_facts}")
string(REPLACE "|" ";" torch_facts "${torch_facts}")
list(GET torch_facts 0 torch_version)
list(GET torch_facts 1 torch_include_dirs)
list(GET torch_facts 2 torch_library_dirs)
list(GET torch_facts 3 torch_cxx11_abi)
string(REPLACE "@" ";" torch_include_dirs "${torch_include_dirs}")
string(REPLACE "@" ";" torch_library_dirs "${torch_library_dirs}")
message(STATUS "torch ${torch_version}: ${torch_include_dirs}")

# Adds one target per set of libraries that a layer may use. SYSTEM silences warnings in torch's
# headers.
function(tdcopier_torch_target name)
  add_library(${name} INTERFACE)
  target_include_directories(${name} SYSTEM INTERFACE ${torch_include_dirs})
  target_compile_definitions(${name} INTERFACE _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi})
  foreach(library IN LISTS ARGN)
    # NO_CACHE: a build folder that is used again may find another torch.
    find_library(found_${library} ${library} PATHS ${torch_library_dirs} NO_DEFAULT_PATH NO_CACHE REQUIRED)
    target_link_libraries(${name} INTERFACE "${found_${library}}")
  endforeach()
endfunction()

tdcopier_torch_target(torch_core c10 torch torch_cpu)           # ATen and c10
tdcopier_torch_target(torch_python_api c10 torch torch_cpu torch_python)  # and torch's Python objects
