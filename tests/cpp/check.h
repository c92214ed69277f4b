// A minimal test harness: CHECK reports where and what failed, run_cases() runs named cases.
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
