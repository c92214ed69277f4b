# Finds the torch that tdcopier is compiled against, so that one recipe serves CPU and CUDA builds,
# and isolated builds, which hide the installed packages.
#
# TDCOPIER_TORCH may name the folder of a torch package, also of another Python: the headers are the
# same. `find_package(Torch)` is not used: with a CUDA build of torch it requires a CUDA toolkit,
# although nothing here compiles device code.
set(TDCOPIER_TORCH "" CACHE PATH "The folder of the torch package to compile against")
set(torch_folder "${TDCOPIER_TORCH}")
if(NOT torch_folder)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/tools/find_torch.py"
    OUTPUT_VARIABLE torch_folder
    OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
endif()
set(torch_include_dirs "${torch_folder}/include" "${torch_folder}/include/torch/csrc/api/include")
set(torch_version_file "${torch_folder}/version.py")
if(NOT EXISTS "${torch_version_file}")
  message(FATAL_ERROR
    "tdcopier is compiled against the torch that it will run with, and ${Python_EXECUTABLE} has "
    "none: run `pip install torch` first, or name its folder with "
    "`-C cmake.define.TDCOPIER_TORCH=FOLDER`.")
endif()
file(STRINGS "${torch_version_file}" torch_version REGEX "^__version__")
string(REGEX MATCH "[0-9]+\\.[0-9]+[^']*" torch_version "${torch_version}")
if(torch_version VERSION_LESS 2.11)
  message(FATAL_ERROR "tdcopier needs torch 2.11 or newer, but ${torch_folder} is ${torch_version}: "
    "run `pip install --upgrade torch` first.")
endif()
message(STATUS "torch ${torch_version}: ${torch_folder}")

# Adds one target per set of libraries that a layer may use. SYSTEM silences warnings in torch's
# headers.
function(tdcopier_torch_target name)
  add_library(${name} INTERFACE)
  target_include_directories(${name} SYSTEM INTERFACE ${torch_include_dirs})
  target_compile_options(${name} INTERFACE "-ffile-prefix-map=${torch_folder}/=torch/")
  foreach(library IN LISTS ARGN)
    # NO_CACHE: a build folder that is used again may find another torch.
    find_library(found_${library} ${library} PATHS "${torch_folder}/lib" NO_DEFAULT_PATH NO_CACHE REQUIRED)
    target_link_libraries(${name} INTERFACE "${found_${library}}")
  endforeach()
endfunction()

tdcopier_torch_target(torch_core c10 torch torch_cpu)           # ATen and c10
tdcopier_torch_target(torch_python_api c10 torch torch_cpu torch_python)  # and torch's Python objects
