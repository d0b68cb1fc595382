// How IREE's runtime calls a kernel in a shared library, version 6 of its interface
// for 3.13 (read from the LLVM code and debug information that its compiler writes).
#pragma once

#include "threads.h"

namespace stand_in {

struct Dispatch {
  uint32_t threads_x, threads_y;
  uint16_t threads_z, constant_count;
  uint32_t groups_x, groups_y;
  uint16_t groups_z;
  uint8_t max_concurrency, binding_count;
  const uint32_t* constants;
  void* const* bindings;
  const size_t* binding_lengths;
};

struct Group {
  uint32_t x, y;
  uint16_t z, reserved;
  uint32_t processor;
  void* local_memory;
  uint32_t local_memory_size;
};

using Function = int (*)(const void* environment, const Dispatch*, const Group*);

struct Header {
  uint32_t version;
  const char* name;
  uint32_t features, sanitizer;
};

struct Attributes {
  uint64_t flags;
  uint16_t local_memory_pages;
  uint8_t constant_count, binding_count;
  uint32_t threads_x, threads_y;
  uint16_t threads_z, parameter_count;
  uint64_t reserved[5];
};
static_assert(sizeof(Attributes) == 64);

struct Kernel {  // what a library of kernels exports of each
  Function function;
  Attributes attributes;
};

struct Library {
  const Header* header;
  struct {
    uint32_t count;
    const void* symbols;
  } imports;
  struct {
    uint32_t count;
    const Function* functions;
    const Attributes* attributes;
    const void* parameters;
    const void* occupancy;
    const char* const* names;
    const void *tags, *parameter_names, *source_locations, *stage_locations;
  } exports;
  struct {
    uint32_t count;
  } constants;
  struct {
    uint32_t count;
    const void* files;
  } sources;
};

// The number of this threadgroup in its grid; the last one is first in reverse.
inline Size group_of(const Dispatch* dispatch, const Group* group) {
  if (!reverse) return {group->x, group->y, group->z};
  return {dispatch->groups_x - 1 - group->x, dispatch->groups_y - 1 - group->y,
          uint32_t(dispatch->groups_z - 1 - group->z)};
}

// For kernels whose threads do not wait for each other.
template <typename Body>
int for_each_thread(Body body, Size threads) {
  uint32_t count = threads.x * threads.y * threads.z;
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t j = reverse ? count - 1 - i : i;
    body(Size{j % threads.x, j / threads.x % threads.y, j / (threads.x * threads.y)});
  }
  return 0;
}

}  // namespace stand_in

// Defined by the linker around the kernels' threadgroup memory; null without any.
extern "C" {
extern char __start_threadgroup_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_threadgroup_memory[] __attribute__((weak, visibility("hidden")));
}

inline void spoil_threadgroup_memory() {
  memset(__start_threadgroup_memory, 0xff,
         __stop_threadgroup_memory - __start_threadgroup_memory);
}
