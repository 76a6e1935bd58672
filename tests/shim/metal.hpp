// The few names of Metal that the kernels use, in C++: threads of a group are threads, barriers and sums are real.
#pragma once
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

using uint = unsigned int;
using std::size_t;
struct uint3 { uint x, y, z; };
namespace mem_flags { struct flag {}; constexpr flag mem_threadgroup{}; }
inline uint min(uint a, uint b) { return a < b ? a : b; }
#define threadgroup static  // groups run one after the other, so their threads share it
#define device

struct Simdgroup {
  std::barrier<> all{32};
  float values[32];
};
struct Group {
  explicit Group(uint threads) : all(threads), simdgroups(threads / 32) {
    for (auto& one : simdgroups) one = std::make_unique<Simdgroup>();
  }
  std::barrier<> all;
  std::vector<std::unique_ptr<Simdgroup>> simdgroups;
};
thread_local Group* current = nullptr;
thread_local uint place = 0;  // of the thread in its group

inline void threadgroup_barrier(mem_flags::flag) { current->all.arrive_and_wait(); }
inline float simd_sum(float value) {
  Simdgroup& own = *current->simdgroups[place / 32];
  own.values[place % 32] = value;
  own.all.arrive_and_wait();
  float sum = 0;
  for (float one : own.values) sum += one;
  own.all.arrive_and_wait();
  return sum;
}

// grid and threadgroup as MLX has them; the grid is a multiple of the group
template <typename Body>
void launch(const uint* grid, const uint* group, Body body) {
  uint threads = group[0] * group[1] * group[2];
  for (uint z = 0; z < grid[2]; z += group[2])
    for (uint y = 0; y < grid[1]; y += group[1])
      for (uint x = 0; x < grid[0]; x += group[0]) {
        Group shared(threads);
        std::vector<std::jthread> running;
        for (uint i = 0; i < threads; i++)
          running.emplace_back([&, i] {
            current = &shared;
            place = i;
            uint3 in_group{i % group[0], i / group[0] % group[1], i / group[0] / group[1]};
            body(uint3{x + in_group.x, y + in_group.y, z + in_group.z}, i);
          });
      }
}
