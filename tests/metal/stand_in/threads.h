// The threads of a threadgroup as fibers of one thread of the CPU.
//
// A fiber runs until it waits for others: at a barrier for the whole threadgroup, at an
// operation of its simdgroup (32 threads with consecutive numbers) for that. The order
// in which fibers run, and threadgroups, is forward or reverse, so that a program that
// hangs on the order, because a barrier is missing, differs in one of them.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace stand_in {

constexpr uint32_t LANES = 32;
constexpr size_t SLOT = 16;  // bytes of the largest value that lanes exchange

enum Operation { BARRIER, SHUFFLE, SHUFFLE_XOR, SUM, PRODUCT, MAX, MIN };

struct Size {
  uint32_t x, y, z;
};

extern int reverse;  // set from outside: order of threads and threadgroups

uint32_t lane();
void wait_for_threadgroup();
// Gives this lane's value, waits until all lanes have given theirs.
void wait_for_simdgroup(Operation, const void* value, size_t size);
// What a lane gave; nullptr where it has ended, or never was.
const void* given(uint32_t lane);

// Runs body(context, thread) for all threads of one threadgroup: 0, or 1 after a
// message where they wait for each other for ever.
using Body = void (*)(void* context, Size thread);
int run_threads(Body body, void* context, Size threads, const char* name);

template <typename T>
struct Exchange {
  static_assert(sizeof(T) <= SLOT);
  Exchange(T value, Operation operation) {
    wait_for_simdgroup(operation, &value, sizeof(T));
  }
  T of(uint32_t lane) {
    T value;
    const void* bytes = given(lane);
    if (bytes) {
      memcpy(&value, bytes, sizeof(T));
    } else {
      memset(&value, 0xff, sizeof(T));  // undefined in Metal
    }
    return value;
  }
  template <typename F>
  T fold(F combine) {
    T total{};
    bool empty = true;
    for (uint32_t i = 0; i < LANES; ++i) {
      uint32_t lane = reverse ? LANES - 1 - i : i;
      if (given(lane)) {
        total = empty ? of(lane) : combine(total, of(lane));
        empty = false;
      }
    }
    return total;
  }
};

}  // namespace stand_in
