// Wraps functions of the native module, so that their errors reach Python as torch's own.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

#include "base/byte_format.h"
#include "base/interleaver.h"
#include "base/internal_error.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/interrupts.h"

namespace tdcopier {

// Turns c10's errors into torch's own Python exceptions, for example torch.OutOfMemoryError.
template <typename Function>
auto with_torch_errors(Function&& function) {
  try {
    return function();
  } catch (pybind11::error_already_set&) {
    throw;
  } catch (pybind11::builtin_exception&) {
    throw;
  } catch (InternalError&) {
    throw;
  } catch (DeadlockError&) {
    throw;
  } catch (Interrupted&) {
    raise_if_interrupted();
    throw;
  } catch (std::out_of_range& error) {  // of BadRowWatch
    throw pybind11::index_error(error.what());
  } catch (MalformedBytes& error) {
    throw pybind11::value_error(error.what());
  } catch (std::bad_alloc&) {  // torch makes a RuntimeError of it
    PyErr_NoMemory();
    throw pybind11::error_already_set();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    throw pybind11::error_already_set();
  }
}

// Wraps a function or member function in with_torch_errors().
template <typename Result, typename... Arguments>
auto guarded(Result (*function)(Arguments...)) {
  return [function](Arguments... arguments) {
    return with_torch_errors([&] { return function(std::forward<Arguments>(arguments)...); });
  };
}
template <typename Class, typename Result, typename... Arguments>
auto guarded(Result (Class::*function)(Arguments...)) {
  return [function](Class& self, Arguments... arguments) {
    return with_torch_errors(
        [&] { return (self.*function)(std::forward<Arguments>(arguments)...); });
  };
}

// Wraps a function of a c10::Device so that it accepts any device argument.
template <typename Function>
auto of_device(Function function) {
  return [function](pybind11::handle device) {
    return with_torch_errors([&] { return function(parse_device(device)); });
  };
}

}  // namespace tdcopier
