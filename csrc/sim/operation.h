// One unit of a stream's work, and when it may begin.
#pragma once

#include <functional>
#include <memory>
#include <utility>

namespace tdcopier::sim {

struct Note;

// An operation must not touch Python.
struct Operation {
  Operation(const char* what, std::function<void()> work) : name(what), run(std::move(work)) {}
  Operation(const char* what, std::function<void()> work, std::function<bool()> ready)
      : name(what), run(std::move(work)), can_begin(std::move(ready)) {}

  const char* name;  // static storage; for example "h2d" or "wait"
  // Blocks: until the operation may begin, unless can_begin() has returned true.
  std::function<void()> run;
  // Returns whether run() would not block now. Empty: it never blocks. Thread: any; must not block.
  std::function<bool()> can_begin;
  bool is_transfer = false;    // between host and device, or between two devices
  std::shared_ptr<Note> note;  // for a detection; null: none is on, or nothing to note
};

}  // namespace tdcopier::sim
