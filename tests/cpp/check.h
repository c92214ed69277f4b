// The few lines that the C++ tests need: a check that says where and what, and a list of named
// cases.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

struct Case {
  const char* name;
  void (*run)();
};

template <size_t N>
int run_cases(const Case (&cases)[N]) {
  for (const Case& test : cases) {
    std::printf("%s\n", test.name);
    test.run();
  }
  return 0;
}
