// Fibers: entered by makecontext, then switched by _setjmp and _longjmp, which leave the
// signal mask alone and so make no system call.
#include "threads.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

namespace stand_in {

int reverse = 0;

namespace {

constexpr uint32_t MAX_THREADS = 1024;
constexpr size_t STACK = 64 * 1024;

enum State { READY, WAITING, ENDED };

struct Fiber {
  jmp_buf where;
  bool entered;
  State state;
  Operation operation;  // that it waits at
  uint32_t turn;        // number of simdgroup operations so far
  // Of this turn and the one before, since a lane may be one operation ahead.
  alignas(SLOT) unsigned char given[2][SLOT];
};

Fiber fibers[MAX_THREADS];
char* stacks;
jmp_buf scheduler;
ucontext_t entering;
uint32_t current, count;
Body body;
void* context;
Size threads;

Size thread_of(uint32_t i) {
  return {i % threads.x, i / threads.x % threads.y, i / (threads.x * threads.y)};
}

void enter() {
  body(context, thread_of(current));
  fibers[current].state = ENDED;
  _longjmp(scheduler, 1);
}

void wait(Operation operation) {
  Fiber& fiber = fibers[current];
  fiber.state = WAITING;
  fiber.operation = operation;
  if (!_setjmp(fiber.where)) _longjmp(scheduler, 1);
}

void run(uint32_t i) {
  current = i;
  if (_setjmp(scheduler)) return;
  Fiber& fiber = fibers[i];
  if (fiber.entered) _longjmp(fiber.where, 1);
  fiber.entered = true;
  getcontext(&entering);
  entering.uc_stack.ss_sp = stacks + i * STACK;
  entering.uc_stack.ss_size = STACK;
  entering.uc_link = nullptr;
  makecontext(&entering, enter, 0);
  setcontext(&entering);
}

// Lets the fibers of [begin, end) go on if all that have not ended wait at the same
// operation, of the kind wanted. Whether any does.
bool release(uint32_t begin, uint32_t end, bool barrier) {
  const Fiber* first = nullptr;
  for (uint32_t i = begin; i < end; ++i) {
    if (fibers[i].state == ENDED) continue;
    if (!first) first = &fibers[i];
    if (fibers[i].operation != first->operation) return false;
  }
  if (!first || (first->operation == BARRIER) != barrier) return false;
  for (uint32_t i = begin; i < end; ++i) {
    if (fibers[i].state == WAITING) fibers[i].state = READY;
  }
  return true;
}

}  // namespace

uint32_t lane() { return current % LANES; }

void wait_for_threadgroup() { wait(BARRIER); }

void wait_for_simdgroup(Operation operation, const void* value, size_t size) {
  Fiber& fiber = fibers[current];
  memcpy(fiber.given[++fiber.turn % 2], value, size);
  wait(operation);
}

const void* given(uint32_t lane) {
  uint32_t other = current - current % LANES + lane;
  uint32_t turn = fibers[current].turn;
  // A lane that ended, or is one operation ahead, took part if it came this far.
  if (lane >= LANES || other >= count || fibers[other].turn < turn) return nullptr;
  return fibers[other].given[turn % 2];
}

int run_threads(Body new_body, void* new_context, Size new_threads, const char* name) {
  body = new_body;
  context = new_context;
  threads = new_threads;
  count = threads.x * threads.y * threads.z;
  if (!stacks) {
    stacks = static_cast<char*>(mmap(nullptr, MAX_THREADS * STACK,
                                     PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  }
  if (stacks == MAP_FAILED || count > MAX_THREADS) {
    fprintf(stderr, "%s: no room for %u threads\n", name, count);
    return 1;
  }
  for (uint32_t i = 0; i < count; ++i) {
    fibers[i].entered = false;
    fibers[i].state = READY;
    fibers[i].turn = 0;
  }
  for (;;) {
    bool any = false;
    for (uint32_t i = 0; i < count; ++i) {
      uint32_t next = reverse ? count - 1 - i : i;
      if (fibers[next].state == READY) run(next);
    }
    uint32_t ended = 0;
    for (uint32_t i = 0; i < count; ++i) ended += fibers[i].state == ENDED;
    if (ended == count) return 0;
    for (uint32_t i = 0; i < count; i += LANES) {
      any |= release(i, i + LANES < count ? i + LANES : count, false);
    }
    any = any || release(0, count, true);
    if (!any) {
      fprintf(stderr, "%s: threads wait for each other at different places\n", name);
      return 1;
    }
  }
}

}  // namespace stand_in
