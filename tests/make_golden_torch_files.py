"""Write tests/golden/torch: small files of torch's and neuraloperator's own making.

    python tests/make_golden_torch_files.py

Needs torch and neuraloperator (extra ``parity``). ``expected.npz`` holds what torch
itself reads from them, so that the lanes without torch have an independent reference.
"""

import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from neuralop.models import FNO

FOLDER = Path(__file__).parent / "golden" / "torch"


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "base": base,
        "view": base[1:, ::2].T,  # shares the storage, with an offset and strides
        "repeated": torch.tensor([1.5]).expand(3, 4),  # strides of zero
        "scalar": torch.tensor(3.25),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "attributed": _with_attribute(torch.tensor([7, 8])),
        "float16": torch.randn(3).half(),
        "float64": torch.randn(3).double(),
        "bfloat16": torch.randn(3).bfloat16(),
        "int8": torch.tensor([-1, 2], dtype=torch.int8),
        "uint8": torch.tensor([1, 255], dtype=torch.uint8),
        "int16": torch.tensor([-300, 2], dtype=torch.int16),
        "int32": torch.tensor([-70000, 2], dtype=torch.int32),
        "int64": torch.tensor([2**40, -2]),
        "uint16": torch.tensor([65535, 2], dtype=torch.uint16),  # untyped storage
        "bool": torch.tensor([True, False]),
        "complex64": torch.randn(2, dtype=torch.complex64),
        "complex128": torch.randn(2, dtype=torch.complex128),
        "conjugated": torch.randn(2, dtype=torch.complex64).conj(),
        "negated": torch.randn(2, dtype=torch.complex64).conj().imag,
    }


def _with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = "a Python attribute"
    return tensor


def content() -> dict:
    """Tensors, and what else checkpoints contain."""
    return tensors() | {
        "plain": [1, 2**70, -3, 1.5, True, None, "text", b"bytes", (1, (2,)), {1, 2}],
        "size": torch.Size([2, 3]),
        "dtype": torch.float32,
        "function": torch.nn.functional.gelu,
        "class": torch.nn.Linear,
        "module": torch.nn.GELU(),
        "device": torch.device("cpu"),
    }


def in_big_endian(path: Path) -> bytes:
    """A copy of a little-endian file as a big-endian machine would have written it."""
    state = torch.load(path, weights_only=False)
    sizes = {
        str(key): _component_size(tensor)
        for key, tensor in enumerate(
            {t.untyped_storage().data_ptr(): t for t in state.values()}.values()
        )
    }
    out = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w") as target:
        for entry in source.infolist():
            data = source.read(entry)
            folder, key = entry.filename.split("/")[-2:]
            if folder == "data":
                data = np.frombuffer(data, f"u{sizes[key]}").byteswap().tobytes()
            target.writestr(entry.filename, b"big" if key == "byteorder" else data)
    return out.getvalue()


def _component_size(tensor: torch.Tensor) -> int:
    return tensor.element_size() // (2 if tensor.is_complex() else 1)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    torch.save(content(), FOLDER / "content.pt")
    # The old format adds the source text of nn.Module classes, and where it lay.
    old = {k: v for k, v in content().items() if k not in ("class", "module")}
    torch.save(old, FOLDER / "content_old.pt", _use_new_zipfile_serialization=False)
    torch.save(content(), FOLDER / "content_protocol_5.pt", pickle_protocol=5)
    typed = {
        key: value.clone()
        for key, value in tensors().items()
        if key in ("base", "float16", "bfloat16", "int64", "bool", "complex64")
    }
    little = FOLDER / "little_endian.pt"
    torch.save(typed, little)
    (FOLDER / "big_endian.pt").write_bytes(in_big_endian(little))
    for name, tensor in torch.load(FOLDER / "big_endian.pt").items():
        assert torch.equal(tensor, typed[name]), name
    little.unlink()

    model = FNO((4, 6), 1, 2, hidden_channels=3, n_layers=2, norm="batch_norm")
    with torch.no_grad():
        for _, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
    model.save_checkpoint(FOLDER, "fno")

    expected = {
        name: tensor.detach().resolve_conj().resolve_neg()
        for name, tensor in tensors().items()
    }
    expected["bfloat16"] = expected["bfloat16"].float()
    state = {k: v for k, v in model.state_dict().items() if k != "_metadata"}
    expected |= {f"fno/{name}": tensor for name, tensor in state.items()}
    np.savez_compressed(
        FOLDER / "expected.npz", **{k: v.numpy() for k, v in expected.items()}
    )


if __name__ == "__main__":
    main()
