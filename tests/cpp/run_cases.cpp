// Runs the cases of one file: `cpp_tests recycled_test`.
#include <cstdio>
#include <filesystem>

#include "check.h"

int main(int argc, char** argv) {
  int run = 0;
  for (const Case& test : all_cases()) {
    if (argc != 2 || std::filesystem::path(test.file).stem() != argv[1]) continue;
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.run();
    ++run;
  }
  return run > 0 ? 0 : 1;
}
