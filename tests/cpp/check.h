// A minimal test harness: CASE(name) { ... } is a case, and CHECK reports where and what failed.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

#define CASE(name)                                             \
  void name();                                                 \
  const Registered registered_##name({__FILE__, #name, name}); \
  void name()

struct Case {
  const char* file;
  const char* name;
  void (*run)();
};

// In the order of a file.
inline std::vector<Case>& all_cases() {
  static std::vector<Case> cases;
  return cases;
}

struct Registered {
  explicit Registered(const Case& test) { all_cases().push_back(test); }
};
