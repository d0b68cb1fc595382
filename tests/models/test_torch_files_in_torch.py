"""torch's files with torch at hand: it reads what we write, and we what it writes."""

import collections
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from models.torch_files import TorchGlobal, read_torch, write_torch  # noqa: E402
from models.torch_objects import TORCH_DTYPES  # noqa: E402

DTYPES = {str(name): getattr(torch, name.name) for name in TORCH_DTYPES}


def random_tensor(dtype, shape=(3, 4)):
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(shape, generator=generator, dtype=torch.float64) * 100
    return values.to(dtype)


def assert_equal(array, tensor):
    """Bit by bit, whatever the type."""
    ours = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    theirs = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    assert torch.equal(ours, theirs.view(torch.uint8))
    assert array.shape == tuple(tensor.shape)


@pytest.mark.parametrize("old_format", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_every_dtype_is_read(dtype, old_format, tmp_path):
    tensor = random_tensor(dtype)
    saved = {"whole": tensor, "view": tensor[1:, ::2].T, "one": tensor[2, 3]}
    path = tmp_path / "file.pt"
    torch.save(saved, path, _use_new_zipfile_serialization=not old_format)
    for name, value in read_torch(path).items():
        assert_equal(value, saved[name])


@pytest.mark.parametrize("options", [{}, {"mmap": True}])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_every_dtype_is_written(dtype, options, tmp_path):
    path = tmp_path / "file.pt"
    torch.save(random_tensor(dtype), path)
    array = read_torch(path)
    write_torch(
        path, {"x": array, "transposed": array.T, "scalar": array[1:2, 2].reshape(())}
    )
    again = torch.load(path, weights_only=True, **options)
    assert_equal(array, again["x"])
    assert_equal(array.T, again["transposed"])
    assert_equal(array[1:2, 2].reshape(()), again["scalar"])


def test_torch_reads_all_that_is_written(tmp_path):
    value = {
        "ordered": collections.OrderedDict(b=1, a=[1, (2, "x"), {}]),
        "numbers": [0, -1, 2**31, -(2**31) - 1, 2**70, 1.5, True, None],
        "empty": np.zeros((0, 3), np.float32),
        "dtype": np.dtype(np.float64),
        3: np.float64(0.1),
    }
    path = tmp_path / "file.pt"
    write_torch(path, value)
    again = torch.load(path, weights_only=True)
    assert list(again) == list(value)
    assert again["ordered"] == value["ordered"]
    assert type(again["ordered"]) is collections.OrderedDict
    assert again["numbers"] == value["numbers"]
    assert again["empty"].shape == (0, 3)
    assert again["dtype"] is torch.float64
    assert again[3] == 0.1


def test_references_to_functions_and_classes(tmp_path):
    path = tmp_path / "file.pt"
    names = {"gelu": ("torch._C._nn", "gelu"), "linear": ("torch.nn", "Linear")}
    write_torch(path, {key: TorchGlobal(*name) for key, name in names.items()})
    again = torch.load(path, weights_only=False)
    assert again == {"gelu": torch.nn.functional.gelu, "linear": torch.nn.Linear}
    with pytest.raises(Exception, match="weights_only|Weights only"):
        torch.load(path, weights_only=True)


def test_storages_are_aligned_as_torch_aligns_them(tmp_path):
    write_torch(tmp_path / "file.pt", [np.arange(n, dtype=np.int8) for n in (3, 5, 7)])
    reader = torch._C.PyTorchFileReader(str(tmp_path / "file.pt"))
    assert [reader.get_record_offset(f"data/{i}") % 64 for i in range(3)] == [0, 0, 0]


def test_files_without_checksums(tmp_path):
    """torch can leave them out, for speed; the numbers are then taken as they are."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(random_tensor(torch.float32), tmp_path / "file.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert_equal(read_torch(tmp_path / "file.pt"), random_tensor(torch.float32))


def test_an_optimiser_s_state(tmp_path):
    """What checkpoints hold beside weights: nested dicts with integer keys."""
    layer = torch.nn.Linear(3, 2)
    optimiser = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    torch.save({"optimiser": optimiser.state_dict(), "epoch": 3}, tmp_path / "file.pt")
    again = read_torch(tmp_path / "file.pt")
    assert again["epoch"] == 3
    assert_equal(
        again["optimiser"]["state"][0]["exp_avg"],
        optimiser.state_dict()["state"][0]["exp_avg"],
    )
    assert json.dumps(again["optimiser"]["param_groups"], default=list)


@pytest.mark.parametrize("old_format", [False, True])
def test_modules_are_records(old_format, tmp_path):
    """The old format puts the source text of their classes into the file."""
    saved = {"class": torch.nn.Linear, "module": torch.nn.GELU("tanh")}
    path = tmp_path / "file.pt"
    torch.save(saved, path, _use_new_zipfile_serialization=not old_format)
    again = read_torch(path)
    assert again["class"] == TorchGlobal("torch.nn.modules.linear", "Linear")
    assert again["module"].kind == TorchGlobal("torch.nn.modules.activation", "GELU")
    assert again["module"].state["approximate"] == "tanh"


def test_a_script_is_refused(tmp_path):
    with pytest.warns(DeprecationWarning):
        scripted = torch.jit.script(torch.nn.Linear(2, 2))
    scripted.save(tmp_path / "file.pt")
    with pytest.raises(ValueError, match="TorchScript"):
        read_torch(tmp_path / "file.pt")
