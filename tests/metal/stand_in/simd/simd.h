// The shaders include it; all they need of it is in metal_stdlib.
