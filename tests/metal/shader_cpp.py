"""Metal shaders as C++: the text stays, but for what C++ has no word for.

``stand_in/`` gives that text its meaning on a CPU. Here each kernel gets a namespace of
its own and the function by which IREE's runtime calls it.
"""

import re

from metal.iree_metal import Kernel

# SPIRV-Cross's array class has one method an address space, which C++ takes for one
# method many times; stand_in/metal_stdlib has it once.
ARRAY_CLASS = re.compile(
    r"template<typename T, size_t Num>\nstruct spvUnsafeArray\n\{.*?\n\};\n", re.DOTALL
)
INCLUDES = re.compile(r"^#(?:include|pragma) .*\n", re.MULTILINE)
COMMENT = re.compile(r"//.*")
SIGNATURE = re.compile(r"kernel void (\w+)\((.*)\)\n\{")
PARAMETER = re.compile(r"(?:constant )?(\w+)(&)? (\w+) \[\[(\w+(?:\(\d+\))?)\]\]")
BINDING = re.compile(r"device (\w+)\* (\w+) \[\[id\((\d+)\)\]\];")
WAITS = re.compile(r"\b(?:\w+_barrier|simd\w*_\w+|quad_\w+|atomic_\w+)\(")
# What the host hands to a kernel, by its attribute.
VALUES = {
    "buffer(0)": "bindings",
    "buffer(3)": "*reinterpret_cast<const {type}*>(dispatch->constants)",
    "threadgroup_position_in_grid": "uint3(group.x, group.y, group.z)",
    "thread_position_in_threadgroup": "uint3(thread_id.x, thread_id.y, thread_id.z)",
    "threadgroups_per_grid": (
        "uint3(dispatch->groups_x, dispatch->groups_y, dispatch->groups_z)"
    ),
    "thread_index_in_simdgroup": "stand_in::lane()",
}
PROLOGUE = '#include "metal_stdlib"\n#include "kernels.h"\nusing namespace metal;\n'


def symbol(number: int) -> str:
    """What a library of kernels exports of this one."""
    return f"exported_{number}"


def translate(kernel: Kernel, number: int) -> str:
    """C++ with the kernel and ``symbol(number)``, to follow ``PROLOGUE``.

    Raises:
        ValueError: for a shader of a form that is not known here.
    """
    text = INCLUDES.sub("", kernel.source).replace("using namespace metal;", "")
    text = ARRAY_CLASS.sub("", text)
    text = COMMENT.sub("", text)
    text = re.sub(r"\.(xy|zw)\b", r".\1()", text)
    signature = SIGNATURE.search(text)
    if signature is None or signature[1] != kernel.entry:
        raise ValueError(f"{kernel.entry}: no such kernel in its shader")
    found = BINDING.findall(text)
    if text.count("[[id(") != len(found):
        raise ValueError(f"{kernel.entry}: a binding that is not a device pointer")
    bindings = "".join(
        f"  bindings.{name} = static_cast<{type_}*>(dispatch->bindings[{i}]);\n"
        for type_, name, i in found
    )
    fibers = WAITS.search(text[signature.end() :]) is not None
    x, y, z = kernel.threads
    return _TEMPLATE.format(
        text=text,
        number=number,
        entry=kernel.entry,
        x=x,
        y=y,
        z=z,
        arguments=", ".join(_arguments(kernel.entry, signature[2])),
        bindings=bindings,
        run=_FIBERS.format(entry=kernel.entry) if fibers else _LOOP,
        num_bindings=1 + max((int(i) for _, _, i in found), default=-1),
        num_constants=_num_constants(text),
        symbol=symbol(number),
    )


def _arguments(entry: str, parameters: str) -> list[str]:
    arguments = []
    for parameter in parameters.split(", "):
        match = PARAMETER.fullmatch(parameter)
        if match is None or match[4] not in VALUES:
            raise ValueError(f"{entry}: an argument of unknown kind, {parameter}")
        arguments.append(VALUES[match[4]].format(type=match[1]))
    return arguments


def _num_constants(text: str) -> int:
    match = re.search(r"constant (\w+)& \w+ \[\[buffer\(3\)\]\]", text)
    if match is None:
        return 0
    body = re.search(rf"struct {match[1]}\n\{{\n    uint _m0\[(\d+)\];\n\}};", text)
    if body is None:
        raise ValueError("constants that are no array of uint")
    return int(body[1])


_FIBERS = """  spoil_threadgroup_memory();
  using Run = decltype(run);
  return stand_in::run_threads(
      [](void* run, stand_in::Size id) {{ (*static_cast<Run*>(run))(id); }},
      &run, threads, "{entry}");"""
_LOOP = "  return stand_in::for_each_thread(run, threads);"
_TEMPLATE = """
namespace kernel_{number} {{
{text}
const stand_in::Size threads{{{x}, {y}, {z}}};

int dispatch(const void*, const stand_in::Dispatch* dispatch,
             const stand_in::Group* own) {{
  [[maybe_unused]] const stand_in::Size group = stand_in::group_of(dispatch, own);
  spvDescriptorSetBuffer0 bindings{{}};
{bindings}  auto run = [&](stand_in::Size thread_id) {{
    {entry}({arguments});
  }};
{run}
}}

}}  // namespace kernel_{number}

extern "C" const stand_in::Kernel {symbol};
const stand_in::Kernel {symbol}{{
    kernel_{number}::dispatch,
    {{0, 0, {num_constants}, {num_bindings}, {x}, {y}, {z}, 0, {{}}}}}};
"""
