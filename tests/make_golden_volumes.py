"""Write tests/golden/volumes.npz from PyTorch networks.

    python tests/make_golden_volumes.py

Needs torch (extra ``parity``). The parity tests read the file in every lane, and in the
one with torch make it anew and compare.
"""

import numpy as np
from volume_cases import CASES, GOLDEN, pack, reference


def main() -> None:
    arrays = {
        f"{case.name}/{key}": value
        for case in CASES.values()
        for key, value in pack(reference(case)).items()
    }
    np.savez_compressed(GOLDEN, **arrays)
    print(f"{GOLDEN.name}: {len(CASES)} cases, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
