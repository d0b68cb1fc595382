"""torch's files without torch: what is read, what is refused, and that nothing runs.

The files under tests/golden/torch are torch's own; ``expected.npz`` is torch's reading.
"""

import builtins
import codecs
import collections
import io
import os
import pickle
import struct
import subprocess
import tracemalloc
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from torch_archives import archive, integer, storage, tensor, text

from models.torch_files import TorchGlobal, TorchRecord, read_torch, write_torch
from models.torch_objects import TORCH_DTYPES

GOLDEN = Path(__file__).parents[1] / "golden" / "torch"
CONTENTS = ("content.pt", "content_old.pt", "content_protocol_5.pt")
INERT = (
    (str, bytes, bytearray, int, float, complex, type(None), np.ndarray, np.dtype)
    + (list, tuple, dict, set, frozenset, TorchGlobal, TorchRecord)
)  # fmt: skip


def assert_inert(value):
    """Nothing but data: no function, class or instance of a class out of the file."""
    todo, seen = [value], set()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        assert isinstance(item, INERT) and not callable(item), type(item)
        if isinstance(item, dict):
            assert type(item) in (dict, collections.OrderedDict)
            assert not getattr(item, "__dict__", None)
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo += list(item)
        elif isinstance(item, TorchRecord):
            todo += [item.kind, item.arguments, item.state, item.items]


def read_bytes(tmp_path, data: bytes):
    path = tmp_path / "file.pt"
    path.write_bytes(data)
    return read_torch(path)


# What torch wrote


@pytest.mark.parametrize("name", CONTENTS)
def test_tensors_are_what_torch_reads(name):
    content = read_torch(GOLDEN / name)
    with np.load(GOLDEN / "expected.npz") as file:
        expected = {k: file[k] for k in file.files if "/" not in k}
    assert len(expected) == 21
    for key, array in expected.items():
        value = content[key]
        if key == "bfloat16":
            assert value.dtype == ml_dtypes.bfloat16
            value = value.astype(np.float32)
        assert value.dtype == array.dtype and value.shape == array.shape, key
        np.testing.assert_array_equal(value, array, err_msg=key)


@pytest.mark.parametrize("name", CONTENTS)
def test_all_else_is_plain_data(name):
    content = read_torch(GOLDEN / name)
    assert_inert(content)
    assert content["plain"] == [
        1, 2**70, -3, 1.5, True, None, "text", b"bytes", (1, (2,)), {1, 2}
    ]  # fmt: skip
    assert content["size"] == (2, 3)
    assert content["dtype"] == np.float32
    assert content["function"] == TorchGlobal("torch._C._nn", "gelu")
    assert content["device"].arguments == ("cpu",)
    if name != "content_old.pt":
        assert content["class"] == TorchGlobal("torch.nn.modules.linear", "Linear")
        assert str(content["module"].kind) == "torch.nn.modules.activation.GELU"
        assert content["module"].state["approximate"] == "none"


def test_tensors_share_memory_where_torch_s_do():
    content = read_torch(GOLDEN / "content.pt")
    assert np.shares_memory(content["base"], content["view"])
    assert not np.shares_memory(content["base"], content["repeated"])


def test_big_endian_files():
    with np.load(GOLDEN / "expected.npz") as file:
        for key, value in read_torch(GOLDEN / "big_endian.pt").items():
            assert value.dtype.isnative
            np.testing.assert_array_equal(value.astype(file[key].dtype), file[key])


# Code in files


class Payload:
    """Pickles to a call of a function, as attacks do."""

    def __init__(self, function, *arguments, state=None):
        self.call = (function, arguments, state)

    def __reduce__(self):
        return self.call


def payloads(marker: str) -> dict[str, bytes]:
    """Pickles which, run by Python's unpickler, would make the file ``marker``."""
    touch = f"open({marker!r}, 'w').close()"
    command = f"touch {marker}"
    objects = {
        "os.system": Payload(os.system, command),
        "eval": Payload(eval, touch),
        "exec": Payload(exec, touch),
        "subprocess": Payload(subprocess.call, ["touch", marker]),
        "open": Payload(open, marker, "w"),
        "nested": {"a": [1, (2, {"b": Payload(eval, touch)})]},
        "in the arguments": Payload(str, Payload(eval, touch)),
        "in the state": Payload(dict, state={"x": Payload(eval, touch)}),
    }
    made = {}
    for name, value in objects.items():
        for protocol in range(6):
            made[f"{name}, protocol {protocol}"] = pickle.dumps(value, protocol)
    os_name = os.system.__module__
    system = f"c{os_name}\nsystem\n".encode()
    call = system + b"(" + text(command) + b"tR"
    made["called twice"] = b"\x80\x02" + call + b"(" + text(command) + b"tR."
    made["result of getattr"] = (
        b"\x80\x02c__builtin__\ngetattr\n(cos\npath\n" + text("join") + b"tR)R."
    )
    made["new object"] = b"\x80\x02" + system + b"(" + text(command) + b"t\x81."
    made["new object, keywords"] = (
        b"\x80\x04" + system + b"(" + text(command) + b"t}\x92."
    )
    made["old instance"] = b"(" + text(command) + f"i{os_name}\nsystem\n.".encode()
    made["old object"] = b"(" + system + text(command) + b"o."
    made["state"] = b"\x80\x02" + call + b"}" + text("__class__") + system + b"sb."
    made["state of a dict"] = b"\x80\x02}}" + text("__reduce__") + system + b"sb."
    made["state of a list"] = b"\x80\x02]}" + text("append") + system + b"sb."
    made["appended to"] = b"\x80\x02" + call + b"(K\x01K\x02e."
    made["set in"] = b"\x80\x02" + call + b"(K\x01K\x02u."
    made["as a storage"] = b"\x80\x02" + storage(1, system) + b"."
    made["as a storage's key"] = b"\x80\x02(" + text("storage") + system * 2 + b"tQ."
    made["as a tensor's maker"] = (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n("
        + system + b"ctorch\nTensor\n(" + text(command) + b"t}tR."
    )  # fmt: skip
    made["as a hook"] = (
        b"\x80\x02ctorch._utils\n_rebuild_parameter\n(" + call + b"\x89" + call + b"tR."
    )
    made["extension registry"] = b"\x80\x02\x82\x01."
    made["persistent id as text"] = b"Pos.system\n."
    return made


PAYLOADS = list(payloads("never"))


@pytest.mark.parametrize("name", PAYLOADS)
def test_code_in_a_file_is_never_run(name, tmp_path, monkeypatch):
    marker = tmp_path / "was-run"
    pickled = payloads(str(marker))[name]

    codecs.lookup("raw-unicode-escape")  # Python imports a codec at its first use

    def refuse(*arguments, **_):
        raise AssertionError(f"the reader imports {arguments[0]}")

    path = tmp_path / "file.pt"
    path.write_bytes(archive(pickled))
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", refuse)
        try:
            result = read_torch(path)
        except ValueError as error:
            assert str(path) in str(error)
            result = None
    assert_inert(result)
    assert not marker.exists()


def test_the_payloads_would_run_where_python_reads_them(tmp_path):
    """Else the test above would show nothing."""
    marker = tmp_path / "was-run"
    pickle.loads(payloads(str(marker))["eval, protocol 2"])
    assert marker.exists()


def test_a_call_is_kept_as_a_record(tmp_path):
    record = read_bytes(tmp_path, archive(pickle.dumps(Payload(eval, "1 + 1"), 2)))
    assert record.kind == TorchGlobal("__builtin__", "eval")
    assert record.arguments == ("1 + 1",)
    with pytest.raises(TypeError, match="not callable"):
        record.kind("1 + 1")
    with pytest.raises(TypeError, match="not callable"):
        record("1 + 1")


def test_attributes_never_reach_a_dict(tmp_path):
    """torch sets ``_metadata`` on its state dicts; any attribute could come so."""
    pickled = b"\x80\x02ccollections\nOrderedDict\n)R}" + text("items") + b"K\x01sb."
    result = read_bytes(tmp_path, archive(pickled))
    assert result == {} and list(result.items()) == []


# Tensors that lie


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (0, (7,), (1,)),
        (1, (6,), (1,)),
        (0, (2, 3), (4, 1)),
        (6, (1,), (1,)),
        (-1, (2,), (1,)),
        (2**62, (2,), (1,)),
        (0, (2,), (-1,)),
        (0, (-2,), (1,)),
        (0, (2,), (2**63,)),
        (0, (2, 3), (1,)),
        (0, (2**40, 2**40), (0, 0)),
        (0, (1,) * 70, (1,) * 70),
    ],
)
def test_tensors_outside_their_storage_are_refused(offset, size, stride, tmp_path):
    pickled = b"\x80\x02" + tensor(offset, size, stride) + b"."
    with pytest.raises(ValueError, match="can't be read"):
        read_bytes(tmp_path, archive(pickled, [np.arange(6, dtype=np.float32)]))


@pytest.mark.parametrize(
    ("offset", "size", "stride", "expected"),
    [
        (0, (6,), (1,), [0, 1, 2, 3, 4, 5]),
        (1, (2, 2), (3, 1), [[1, 2], [4, 5]]),
        (5, (2,), (0,), [5, 5]),
        (9, (0,), (1,), []),
        (3, (), (), 3),
    ],
)
def test_tensors_inside_their_storage(offset, size, stride, expected, tmp_path):
    pickled = b"\x80\x02" + tensor(offset, size, stride) + b"."
    data = archive(pickled, [np.arange(6, dtype=np.float32)])
    np.testing.assert_array_equal(read_bytes(tmp_path, data), np.float32(expected))


@pytest.mark.parametrize(
    ("count", "storages", "text_"),
    [
        (7, [np.zeros(6, np.float32)], "storage 0 has 24 bytes for 7"),
        (2**60, [np.zeros(6, np.float32)], "storage 0 has 24 bytes"),
        (6, [], "the entry data/0 is missing"),
    ],
)
def test_storages_smaller_than_they_claim_are_refused(count, storages, text_, tmp_path):
    pickled = b"\x80\x02" + tensor(0, (1,), (1,), count) + b"."
    with pytest.raises(ValueError, match=text_):
        read_bytes(tmp_path, archive(pickled, storages))


def test_bytes_that_are_no_bool_become_one(tmp_path):
    kind = b"ctorch\nBoolStorage\n"
    pickled = b"\x80\x02" + tensor(0, (3,), (1,), 3, kind) + b"."
    mask = read_bytes(tmp_path, archive(pickled, [np.array([0, 1, 7], np.uint8)]))
    assert mask.view(np.uint8).tolist() == [0, 1, 1]


def test_quantised_storages_are_named(tmp_path):
    pickled = b"\x80\x02" + storage(1, b"ctorch\nQInt8Storage\n") + b"."
    with pytest.raises(ValueError, match="torch.QInt8Storage, which numpy has no type"):
        read_bytes(tmp_path, archive(pickled, [np.zeros(1, np.int8)]))


# Pickles that would take for ever, or all memory


def test_keys_whose_hash_never_ends_are_refused(tmp_path):
    nested = b")" + b"q\x00h\x00\x86" * 200  # each a pair of the one before
    with pytest.raises(ValueError, match="tuple is used as a key"):
        read_bytes(tmp_path, archive(b"\x80\x02}" + nested + b"Ns."))


def test_endless_text_in_an_error_is_not_made(tmp_path):
    nested = b"]" + b"q\x000]h\x00ah\x00a" * 200  # each a list of the last, twice
    pickled = b"\x80\x02" + nested + b"."
    assert_inert(read_bytes(tmp_path, archive(pickled)))
    wrong = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage(6) + nested
        + b")" + b")" + b"\x89NtR."
    )  # fmt: skip
    with pytest.raises(ValueError, match="must be integers"):
        read_bytes(tmp_path, archive(wrong, [np.zeros(6, np.float32)]))


@pytest.mark.parametrize("opcodes", [b"ctorch\nSize\n", b"c__builtin__\nset\n"])
def test_a_repeated_tensor_is_not_spelled_out(opcodes, tmp_path):
    huge = tensor(0, (2**50,), (0,))
    storages = [np.zeros(6, np.float32)]
    assert (
        read_bytes(tmp_path, archive(b"\x80\x02" + huge + b".", storages)).size == 2**50
    )
    with pytest.raises(ValueError, match="items are taken from a ndarray"):
        read_bytes(
            tmp_path, archive(b"\x80\x02" + opcodes + huge + b"\x85R.", storages)
        )


@pytest.mark.parametrize(
    "pickled",
    [b"\x80\x02\x8b\xff\xff\xff\x7f", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f", b"("],
)
def test_lengths_that_lie_ask_for_no_memory(pickled, tmp_path):
    with pytest.raises(ValueError, match="pickle is damaged"):
        read_bytes(tmp_path, archive(pickled))
    old = (GOLDEN / "content_old.pt").read_bytes()
    with pytest.raises(ValueError, match="pickle is damaged"):
        read_bytes(tmp_path, old[:30] + pickled)


def test_deep_nesting_is_read(tmp_path):
    value = read_bytes(
        tmp_path, archive(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".")
    )
    depth = 0
    while value:
        (value,), depth = value, depth + 1
    assert depth == 49_999


# Damage


@pytest.mark.parametrize("name", [*CONTENTS, "fno_state_dict.pt", "fno_metadata.pkl"])
def test_a_file_cut_anywhere_is_refused(name, tmp_path):
    data = (GOLDEN / name).read_bytes()
    positions = {*range(0, len(data), 1 + len(data) // 80), len(data) - 1}
    for position in positions:
        with pytest.raises(ValueError, match=r"file.pt can't be read: .*"):
            read_bytes(tmp_path, data[:position])


@pytest.mark.parametrize("name", [*CONTENTS, "fno_state_dict.pt", "fno_metadata.pkl"])
def test_flipped_bits_load_or_are_refused(name, tmp_path):
    """Never another error, a crash, or anything but data; most flips are found."""
    data = (GOLDEN / name).read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = np.frombuffer(data, np.uint8).copy()
        for position in rng.integers(0, len(data), rng.integers(1, 4)):
            damaged[position] ^= 1 << rng.integers(8)
        try:
            assert_inert(read_bytes(tmp_path, damaged.tobytes()))
        except ValueError as error:
            refused += 1
            assert "can't be read" in str(error)
    assert refused > 30


@pytest.mark.parametrize("name", ["content.pt", "fno_metadata.pkl"])
def test_scrambled_pickles_load_or_are_refused(name, tmp_path):
    """As above, inside an archive whose checksums are right."""
    with zipfile.ZipFile(GOLDEN / name) as file:
        entries = {n.split("/", 1)[1]: file.read(n) for n in file.namelist()}
    pickled = bytearray(entries.pop("data.pkl"))
    rng = np.random.default_rng(1)
    opcodes = b"RQ\x81b)}](ute.\x85\x86\x87\x93\x94\x9201NKhc"
    for _ in range(250):
        scrambled = bytearray(pickled)
        for position in rng.integers(0, len(pickled) - 30, rng.integers(1, 5)):
            if rng.random() < 0.5:
                scrambled[position] = opcodes[rng.integers(len(opcodes))]
            else:
                del scrambled[position : position + rng.integers(1, 6)]
        try:
            assert_inert(read_bytes(tmp_path, archive(bytes(scrambled), **entries)))
        except ValueError as error:
            assert "can't be read" in str(error)


def test_a_wrong_number_is_found_by_its_checksum(tmp_path):
    path = tmp_path / "weights.pt"
    weights = np.linspace(0, 1, 100, dtype=np.float32)
    write_torch(path, weights)
    data = path.read_bytes()
    at = data.index(weights.tobytes()) + 17
    damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    with pytest.raises(ValueError, match="the checksum of data/0 is wrong"):
        read_bytes(tmp_path, damaged)


# Other archives and files


def test_compressed_entries_are_refused(tmp_path):
    """They could unpack to any size; torch never compresses."""
    bomb = archive(b"\x80\x02N." + bytes(10**7), compression=zipfile.ZIP_DEFLATED)
    assert len(bomb) < 20_000
    with pytest.raises(ValueError, match="data.pkl is compressed or encrypted"):
        read_bytes(tmp_path, bomb)


def test_overlapping_entries_are_refused(tmp_path):
    """Many directory entries for one piece of the file: a bomb without compression."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02N.")
        file.writestr("archive/data/0", bytes(1000))
        file.filelist += [
            _renamed(file.filelist[1], f"archive/data/{i}") for i in (1, 2)
        ]
    with pytest.raises(ValueError, match="its entries overlap"):
        read_bytes(tmp_path, out.getvalue())


def _renamed(entry: zipfile.ZipInfo, name: str) -> zipfile.ZipInfo:
    copy = zipfile.ZipInfo(name, entry.date_time)
    copy.CRC, copy.header_offset = entry.CRC, entry.header_offset
    copy.file_size = copy.compress_size = entry.file_size
    return copy


def test_nothing_is_written_to_the_disk(tmp_path):
    data = archive(b"\x80\x02N.", **{"../../../escaped": b"x", "/root": b"x"})
    assert read_bytes(tmp_path, data) is None
    assert [path.name for path in tmp_path.iterdir()] == ["file.pt"]
    assert not (tmp_path.parent / "escaped").exists()


def _npz() -> bytes:
    out = io.BytesIO()
    np.savez(out, x=np.zeros(2))
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "text_"),
    [
        (b"", "it is empty"),
        (b"\x89HDF\r\n\x1a\n" + bytes(99), "open it with h5py"),
        (b"MATLAB 5.0 MAT-file", "scipy.io.loadmat"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"<!DOCTYPE html>", "web page"),
        (b"\x93NUMPY\x01\x00", "numpy.load"),
        (b"some text", "starts with b'some tex'"),
        (_npz(), "open it with numpy.load"),
        (pickle.dumps({"x": [1, 2]}), "a pickle, but not of torch.save"),
        (pickle.dumps(np.zeros(3)), "a pickle, but not of torch.save"),
        (archive(b"\x80\x02N.", **{"constants.pkl": b""}), "TorchScript"),
        (archive(b"\x80\x02N.", byteorder=b"middle"), "byteorder"),
        (b"PK\x05\x06" + bytes(18), "this one has 0"),
    ],
)
def test_foreign_files_are_named(data, text_, tmp_path):
    with pytest.raises(ValueError, match=text_) as caught:
        read_bytes(tmp_path, data)
    assert str(caught.value).startswith(str(tmp_path / "file.pt"))


def test_a_missing_file_and_a_folder_are_the_system_s_errors(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_torch(tmp_path / "absent.pt")
    with pytest.raises(IsADirectoryError):
        read_torch(tmp_path)


# Writing


def test_what_is_written_is_read_again(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        dtype.name: rng.integers(0, 2, (3, 4)).astype(dtype)
        for dtype in TORCH_DTYPES.values()
    }
    value = {
        **arrays,
        "transposed": arrays["float32"].T,
        "foreign": np.arange(4, dtype=">f8"),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "ordered": collections.OrderedDict(b=1, a=2),
        "plain": [1, -(2**31), 2**31, 2**70, -1, 1.5, True, None, "Ünï", (1, (2,)), {}],
        "number": np.float32(1.5),
        "dtype": np.dtype(np.float16),
        "function": TorchGlobal("torch._C._nn", "gelu"),
        5: "an integer key",
    }  # fmt: skip
    write_torch(tmp_path / "file.pt", value)
    again = read_torch(tmp_path / "file.pt")
    assert list(again) == list(value)
    for key, item in value.items():
        if isinstance(item, np.ndarray):
            assert again[key].dtype == item.dtype.newbyteorder("=")
            np.testing.assert_array_equal(again[key], item, err_msg=str(key))
            assert again[key].shape == item.shape
        else:
            assert again[key] == item and type(again[key]) is not np.float32


def test_one_array_twice_is_stored_once_and_bytes_do_not_change(tmp_path):
    array = np.arange(1000.0)
    write_torch(tmp_path / "a.pt", [array, array])
    write_torch(tmp_path / "b.pt", [array, array])
    data = (tmp_path / "a.pt").read_bytes()
    assert len(data) < 1.5 * array.nbytes
    assert data == (tmp_path / "b.pt").read_bytes()
    first, second = read_torch(tmp_path / "a.pt")
    assert np.shares_memory(first, second)


@pytest.mark.parametrize(
    ("value", "text_"),
    [
        (
            {"a": [1, object()]},
            r"\['a'\]\[1\] is of the type object",
        ),
        ([np.array(["x"])], r"\[0\] is an array of <U1"),
        ([np.zeros(2, np.longdouble)], "array of"),
        ([{1, 2}], "set"),
        ([len], "builtin_function_or_method"),
        ([2**3000], "the most is 255"),
        ([TorchGlobal("os\nsystem", "x")], "dotted names"),
    ],
)
def test_what_can_not_be_written_is_named_and_nothing_is_left(value, text_, tmp_path):
    path = tmp_path / "file.pt"
    path.write_bytes(b"what was there")
    with pytest.raises(ValueError, match=text_):
        write_torch(path, value)
    assert path.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_values_that_contain_themselves_are_refused(tmp_path):
    endless: list = []
    endless.append(endless)
    with pytest.raises(ValueError, match="contains itself"):
        write_torch(tmp_path / "file.pt", endless)
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="too deeply"):
        write_torch(tmp_path / "file.pt", deep)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.pt"
    write_torch(path, "old")

    def fail(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="disk is full"):
            write_torch(path, "new")
    assert read_torch(path) == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_paths_that_can_not_be_written_are_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file is no folder"):
        write_torch(tmp_path / "file" / "x.pt", 1)
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        write_torch(tmp_path, 1)
    write_torch(tmp_path / "new" / "folder" / "x.pt", 1)
    assert read_torch(tmp_path / "new" / "folder" / "x.pt") == 1


@pytest.mark.parametrize("old_format", [False, True])
def test_numbers_are_copied_once(old_format, tmp_path):
    """Reading takes the memory of the arrays, writing next to none."""
    path = tmp_path / "large.pt"
    array = np.zeros(4_000_000, np.float32)
    tracemalloc.start()
    write_torch(path, {"x": array})
    written = tracemalloc.get_traced_memory()[1]
    if old_format:
        path.write_bytes(_in_old_format(array))
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    value = read_torch(path)["x"]
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert value.nbytes == array.nbytes
    assert written < 0.1 * array.nbytes
    assert peak < 1.1 * array.nbytes


def _in_old_format(array: np.ndarray) -> bytes:
    magic = b"\x80\x02" + integer(0x1950A86A20F9469CFC6C) + b"."
    version = b"\x80\x02M\xe9\x03."
    kind = b"ctorch\nFloatStorage\n"
    body = tensor(0, array.shape, (1,), array.size, kind)
    body = body.replace(
        b"tQ", b"NtQ"
    )  # old storages name a part of themselves, or None
    value = b"\x80\x02}" + text("x") + body + b"s."
    keys = b"\x80\x02]" + text("0") + b"a."
    length = struct.pack("<q", array.size)
    return magic + version + b"\x80\x02}." + value + keys + length + array.tobytes()
