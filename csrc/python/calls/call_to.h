// Calls the own `.to` of delegated leaves, and keeps what their code raises.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "python/handle/handle.h"
#include "python/walk/flatten.h"

namespace tdcopier {

// Calls `.to` for each delegated leaf and object of `data`, in this thread and under its torch
// state. The handle gets the results, or the failure. GIL: held. Throws: only an interrupt.
void call_to(Handle& handle, pybind11::handle data, const std::vector<Delegated>& delegated,
             c10::Device target);

// Stores what `method` of a delegated leaf has raised as the failure of the copy, with the leaf's
// path as a note (from Python 3.11 on). GIL: held. Requires: `error` is being handled. Throws: it,
// if it is an interrupt.
void fail_with_leaf(Handle& handle, pybind11::error_already_set& error, const char* method,
                    const std::function<std::optional<std::string>()>& path);

}  // namespace tdcopier
