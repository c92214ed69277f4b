// What a stream runs: one piece of work, and when it may begin.
#pragma once

#include <functional>
#include <memory>
#include <utility>

namespace tdcopier::sim {

struct Note;

// Must not touch Python.
struct Operation {
  Operation(const char* what, std::function<void()> work) : name(what), run(std::move(work)) {}
  Operation(const char* what, std::function<void()> work, std::function<bool()> ready)
      : name(what), run(std::move(work)), can_begin(std::move(ready)) {}

  const char* name;  // of static storage: "h2d", "wait" and so on
  // Blocks: until it may begin, if it was not asked first.
  std::function<void()> run;
  // Whether run() would not block now. None: it never blocks. Thread: any; must not block.
  std::function<bool()> can_begin;
  bool is_transfer = false;    // between two places that are not the same device
  std::shared_ptr<Note> note;  // for a detection; null: none is on, or nothing to note
};

}  // namespace tdcopier::sim
