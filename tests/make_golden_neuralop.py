"""Write tests/golden/neuralop_{1,2,3}d.npz from neuraloperator 2.0.0.

    python tests/make_golden_neuralop.py

Needs torch and neuraloperator (extra ``parity``). The parity tests read the files in
every lane, and in the one with torch make them anew and compare.
"""

import numpy as np
from neuralop_cases import CASES, golden_path, pack, reference


def main() -> None:
    files: dict = {}
    for case in CASES.values():
        packed = pack(reference(case))
        arrays = files.setdefault(golden_path(case), {})
        arrays |= {f"{case.name}/{key}": value for key, value in packed.items()}
    for path, arrays in files.items():
        np.savez_compressed(path, **arrays)
        print(f"{path.name}: {len(arrays) // 2} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
