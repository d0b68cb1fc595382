"""Files that people bring: containers, keys, the channel axis, and what is refused."""

import zipfile

import h5py
import numpy as np
import pytest
import scipy.io

from models.torch_files import write_torch
from train.data import read_inputs, read_pairs
from train.data.pairs import make_pairs


def values(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def save_hdf5(path, arrays):
    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            file[key] = array


def save_matlab_73(path, arrays):
    """As MATLAB does: 512 bytes for people before HDF5, axes reversed."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for key, array in arrays.items():
            file[key] = np.ascontiguousarray(array.T)
        file.create_group("#refs#")["a"] = np.zeros(3)
    with open(path, "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(512))


SAVERS = {
    ".pt": write_torch,
    ".npz": lambda path, arrays: np.savez_compressed(path, **arrays),
    ".mat": scipy.io.savemat,
    "v73.mat": save_matlab_73,
    ".hdf5": save_hdf5,
}


DARCY_FILES = [("train16", 1000, 16), ("test16", 50, 16), ("test32", 50, 32)]


@pytest.fixture(params=SAVERS)
def save(request, tmp_path):
    """Writes arrays to a file of each kind and returns its path."""

    def to_file(arrays):
        path = tmp_path / f"set{request.param}"
        SAVERS[request.param](path, arrays)
        return path

    return to_file


def check(array, expected):
    assert array.dtype == np.dtype("=f4") and array.dtype.isnative
    assert array.flags.c_contiguous
    np.testing.assert_array_equal(array, expected.astype(np.float32))


@pytest.mark.parametrize(
    "keys",
    [
        ("x", "y"),
        ("input", "output"),
        ("inputs", "targets"),
        ("coeff", "sol"),
        ("a", "u"),
        ("nu", "tensor"),
    ],
)
def test_every_container_and_published_name(save, keys):
    x, y = values(4, 18, 17), values(4, 18, 17, seed=1).astype(np.float32)
    path = save({keys[0]: x, keys[1]: y, "Kcoeff": values(2, 3)})
    pairs = read_pairs(path)
    check(pairs.inputs, x[..., None])
    check(pairs.targets, y[..., None])
    assert len(pairs) == 4 and pairs.grid == (18, 17)
    assert str(path) in pairs.source and repr(keys[0]) in pairs.source
    check(read_inputs(path), x[..., None])


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float32, np.float64])
def test_dtypes_become_float32(save, dtype):
    x = (
        (10 * values(3, 7, 7)).astype(dtype)
        if dtype is not bool
        else values(3, 7, 7) > 0
    )
    check(read_pairs(save({"x": x, "y": values(3, 7, 7)})).inputs, x[..., None])


def test_foreign_byte_order_and_half_precision(tmp_path):
    path = tmp_path / "set.npz"
    x, y = values(3, 9).astype(">f8"), values(3, 9).astype(np.float16)
    np.savez(path, x=x, y=y)
    check(read_pairs(path).inputs, x[..., None])
    check(read_pairs(path).targets, y[..., None])


def test_limit_and_subsample(save):
    x, y = values(6, 21, 17), values(6, 21, 17, seed=1)
    path = save({"x": x, "y": y})
    pairs = read_pairs(path, subsample=4, limit=2)
    check(pairs.inputs, x[:2, ::4, ::4, None])
    check(pairs.targets, y[:2, ::4, ::4, None])
    assert len(read_pairs(path, limit=100)) == 6
    check(read_inputs(path, subsample=4, limit=2), x[:2, ::4, ::4, None])


def test_subsampling_leaves_channels_alone(tmp_path):
    path = tmp_path / "set.npz"
    x, y = values(2, 4, 9, 9), values(2, 9, 9)
    np.savez(path, x=x, y=y)
    pairs = read_pairs(path, subsample=2)
    check(pairs.inputs, np.moveaxis(x, 1, -1)[:, ::2, ::2])
    check(pairs.targets, y[:, ::2, ::2, None])


def test_named_keys(save):
    arrays = {
        "x": values(3, 8),
        "y": values(3, 8, seed=1),
        "flux": values(3, 8, seed=2),
    }
    path = save(arrays)
    pairs = read_pairs(path, input_key="y", target_key="flux")
    check(pairs.inputs, arrays["y"][..., None])
    check(pairs.targets, arrays["flux"][..., None])
    check(read_pairs(path, input_key="x").targets, arrays["y"][..., None])
    check(read_inputs(path, "flux"), arrays["flux"][..., None])


def test_unknown_keys_are_listed_with_shapes(save):
    path = save({"speed": values(3, 8), "pressure": values(3, 8, 9).astype("f4")})
    found = r"speed \(3, 8\) (float64|double).*pressure \(3, 8, 9\) (float32|single)"
    found += r"|pressure .*speed \(3, 8\)"  # HDF5 lists in alphabetic order
    with pytest.raises(
        ValueError, match=f"no known pair of keys: give input_key.*{found}"
    ):
        read_pairs(path)
    with pytest.raises(
        ValueError, match=f"no array 'velocity': give target_key.*{found}"
    ):
        read_pairs(path, input_key="speed", target_key="velocity")
    with pytest.raises(ValueError, match="give target_key"):
        read_pairs(path, input_key="speed")
    with pytest.raises(ValueError, match="give input_key"):
        read_inputs(path)


def test_a_single_array_needs_no_name(tmp_path):
    path = tmp_path / "set.npz"
    np.savez(path, anything=values(2, 16))
    check(read_inputs(path), values(2, 16)[..., None])


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_channels_come_last(tmp_path, first, last):
    x, y = values(5, 9, 8, 3), values(5, 9, 8, 2, seed=1)
    path = tmp_path / "set.npz"
    np.savez(
        path,
        x=np.moveaxis(x, -1, 1) if first else x,
        y=np.moveaxis(y, -1, 1) if last else y,
    )
    pairs = read_pairs(path)
    check(pairs.inputs, x)
    check(pairs.targets, y)


# Fields that depend on time.


def test_time_is_refused_unless_it_is_to_be_channels(save):
    a, u = values(3, 12, 12), values(3, 12, 12, 5, seed=1)
    path = save({"a": a, "u": u, "t": np.arange(5.0)[None]})
    with pytest.raises(ValueError, match=r"depend on time \(key 't'.*channel_axis"):
        read_pairs(path)
    pairs = read_pairs(path, channel_axis=-1)
    check(pairs.inputs, a[..., None])
    check(pairs.targets, u)


def test_pdebench_darcy_has_one_time(tmp_path):
    nu, tensor = values(3, 12, 12), values(3, 1, 12, 12, seed=1)
    path = tmp_path / "2D_DarcyFlow.hdf5"
    save_hdf5(path, {"nu": nu, "tensor": tensor, "t-coordinate": np.zeros(1)})
    check(read_pairs(path).targets, np.moveaxis(tensor, 1, -1))


# What is refused.


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_values_that_are_not_finite_are_counted_and_located(save, bad):
    x, y = values(4, 6, 6), values(4, 6, 6)
    y[2, 3, 1] = y[3, 5, 4] = bad
    path = save({"x": x, "y": y})
    with pytest.raises(ValueError) as caught:
        read_pairs(path)
    assert "targets must be finite in float32, got 2 NaN or infinite" in str(
        caught.value
    )
    assert "(sample, x, y, channel) = (2, 3, 1, 0)" in str(caught.value)
    assert len(read_pairs(path, limit=2)) == 2


def test_complex_values_are_refused(save):
    path = save({"x": values(3, 8) + 1j, "y": values(3, 8)})
    with pytest.raises(ValueError, match="'x' must be real, got complex values"):
        read_pairs(path)


def test_complex_matlab_73_is_refused(tmp_path):
    path = tmp_path / "set.mat"
    compound = np.zeros((8, 3), [("real", "f8"), ("imag", "f8")])
    with h5py.File(path, "w", userblock_size=512) as file:
        file["x"] = compound
        file["y"] = values(8, 3)
    with pytest.raises(ValueError, match="must be real, got complex values"):
        read_pairs(path)


def test_text_is_refused(tmp_path):
    path = tmp_path / "set.npz"
    np.savez(path, x=np.array([["a", "b"]]), y=values(1, 2))
    with pytest.raises(ValueError, match="must hold numbers"):
        read_pairs(path)


def test_different_numbers_of_samples_are_refused(save):
    path = save({"x": values(4, 8, 8), "y": values(5, 8, 8)})
    with pytest.raises(ValueError, match=r"same number of samples.*'x' \(4, 8, 8\)"):
        read_pairs(path)


def test_different_grids_are_refused(save):
    path = save({"x": values(4, 8, 8), "y": values(4, 9, 9)})
    with pytest.raises(ValueError, match="channel axis"):
        read_pairs(path)
    with pytest.raises(ValueError, match=r"got \(8, 8\) and \(9, 9\) points"):
        read_pairs(path, channel_axis=None)


@pytest.mark.parametrize("shape", [(0, 8, 8), (4, 0, 8), (4,)])
def test_empty_sets_are_refused(tmp_path, shape):
    path = tmp_path / "set.npz"
    np.savez(path, x=np.zeros(shape), y=np.zeros(shape))
    with pytest.raises(ValueError, match="must have samples and at least one axis"):
        read_pairs(path)


@pytest.mark.parametrize("kind", SAVERS)
@pytest.mark.parametrize("damage", ["half", "start", "empty", "foreign"])
def test_damaged_files_are_refused(tmp_path, kind, damage):
    path = tmp_path / f"set{kind}"
    SAVERS[kind](path, {"x": values(4, 20, 20), "y": values(4, 20, 20)})
    content = path.read_bytes()
    path.write_bytes(
        {
            "half": content[: len(content) // 2],
            "start": content[:600],
            "empty": b"",
            "foreign": b"<html>not found</html>" * 50,
        }[damage]
    )
    with pytest.raises(ValueError, match=str(path)) as caught:
        read_pairs(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [".npz", ".pt"])
def test_flipped_bits_are_found(tmp_path, kind):
    path = tmp_path / f"set{kind}"
    arrays = {"x": values(4, 20, 20), "y": values(4, 20, 20)}
    if kind == ".npz":
        np.savez(path, **arrays)
    else:
        write_torch(path, arrays)
    content = bytearray(path.read_bytes())
    content[content.find(arrays["y"].tobytes()) + 99] ^= 16
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        read_pairs(path)


def test_objects_in_npz_are_refused_unread(tmp_path):
    path = tmp_path / "set.npz"
    np.savez(path, x=np.array([[{}, {}]], object), y=values(1, 2))
    with pytest.raises(ValueError, match="allow_pickle"):
        read_pairs(path)


@pytest.mark.parametrize("name", ["set.csv", "set", "set.npy"])
def test_other_suffixes_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"must be one of .pt, .pth, .npz, .mat"):
        read_pairs(tmp_path / name)


def test_absent_files_and_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.npz does not exist"):
        read_pairs(tmp_path / "none.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        read_pairs(tmp_path / "folder.npz")


def test_pt_without_a_dictionary(tmp_path):
    write_torch(tmp_path / "set.pt", [values(3, 4)])
    with pytest.raises(ValueError, match="must hold a dictionary of tensors.*got list"):
        read_pairs(tmp_path / "set.pt")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"subsample": 0}, "subsample must be an integer from 1, got 0"),
        ({"subsample": 2.0}, "subsample must be an integer"),
        ({"subsample": 8}, r"leaves \(1, 1\) of \(8, 8\) points"),
        ({"limit": 0}, "limit must be None or at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    path = tmp_path / "set.npz"
    np.savez(path, x=values(3, 8, 8), y=values(3, 8, 8))
    with pytest.raises(ValueError, match=message):
        read_pairs(path, **options)


def test_hdf5_is_read_no_further_than_the_limit(tmp_path, monkeypatch):
    path = tmp_path / "set.mat"
    save_matlab_73(path, {"a": values(50, 6, 6), "u": values(50, 6, 6)})
    read = []
    original = h5py.Dataset.__getitem__

    def recording(self, key, **options):
        result = original(self, key, **options)
        read.append(np.shape(result))
        return result

    monkeypatch.setattr(h5py.Dataset, "__getitem__", recording)
    assert len(read_pairs(path, limit=3)) == 3
    assert read == [(6, 6, 3), (6, 6, 3)]


def test_pairs_of_unequal_arrays_are_refused():
    with pytest.raises(ValueError, match="somewhere: inputs and targets must have"):
        make_pairs(values(2, 4, 1), values(3, 4, 1), "somewhere")
    with pytest.raises(ValueError, match="must lie on one grid"):
        make_pairs(values(2, 4, 1), values(2, 5, 1), "somewhere")
    with pytest.raises(ValueError, match="must not be empty"):
        make_pairs(values(0, 4, 1), values(0, 4, 1), "somewhere")


def raw_storage(path, key, dtype, shape):
    """The numbers of one tensor, as they lie uncompressed in torch's zip file.

    The first axis runs fastest in these: they came out of MATLAB.
    """
    with zipfile.ZipFile(path) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(f"/data/{key}"))
        return np.frombuffer(archive.read(name), dtype).reshape(shape[::-1]).T


@pytest.mark.parametrize("name, count, size", DARCY_FILES)
def test_real_darcy_files_of_neuraloperator(name, count, size):
    from realdata import darcy_files

    path = darcy_files()[name]
    pairs = read_pairs(path)
    shape = (count, size, size)
    check(pairs.inputs, raw_storage(path, 0, bool, shape)[..., None])
    check(pairs.targets, raw_storage(path, 1, "<f4", shape)[..., None])
    assert set(np.unique(pairs.inputs)) == {0.0, 1.0}
