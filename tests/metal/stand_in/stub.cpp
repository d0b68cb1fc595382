// What takes a shader's place in IREE's host program: finds the kernel in a library of
// many. The three names are written over those below, in the built file.
#include <dlfcn.h>

#include "kernels.h"

namespace {

volatile char path[4096] = "LIBRARY";
volatile char symbol[64] = "SYMBOL";
volatile char entry[512] = "ENTRY";

template <size_t size>
const char* text(volatile char (&name)[size]) {
  return const_cast<const char*>(name);
}

const char* const name = text(entry);
const stand_in::Header header{6, name, 0, 0};
stand_in::Function function;
stand_in::Attributes attributes;
const stand_in::Library library{
    &header,
    {0, nullptr},
    {1, &function, &attributes, nullptr, nullptr, &name, nullptr, nullptr, nullptr,
     nullptr},
    {0},
    {0, nullptr}};

}  // namespace

extern "C" const void* iree_hal_executable_library_query(uint32_t version,
                                                         const void* environment) {
  void* handle = dlopen(text(path), RTLD_NOW | RTLD_LOCAL);
  void* found = handle ? dlsym(handle, text(symbol)) : nullptr;
  if (!found || version < 6) return nullptr;
  const auto* kernel = static_cast<const stand_in::Kernel*>(found);
  function = kernel->function;
  attributes = kernel->attributes;
  return &library;
}
