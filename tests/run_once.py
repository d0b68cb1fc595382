"""Programs that run once, as those of tests do: compiling is all that takes time."""

import jax


def run_once(function, *arguments):
    """``function(*arguments)`` compiled as a whole, on a CPU without LLVM's optimiser.

    That takes a quarter to a half of the time, and rounds like the same code.
    """
    lowered = jax.jit(function).lower(*arguments)
    if jax.default_backend() != "cpu":
        return lowered.compile()(*arguments)
    options = {"xla_backend_optimization_level": 0}
    return lowered.compile(compiler_options=options)(*arguments)
