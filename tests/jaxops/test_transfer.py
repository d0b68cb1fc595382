"""to_device: what arrives is contiguous, native, of one real dtype, and a copy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxops import to_device

VALUES = np.arange(-6, 6, dtype=np.float64).reshape(3, 4) / 4


@pytest.mark.parametrize(
    "dtype",
    ["<f8", ">f8", "<f4", ">f4", "<f2", ">f2", ml_dtypes.bfloat16, np.longdouble],
)
def test_floats_arrive_as_float32(dtype):
    arrived = to_device(VALUES.astype(dtype))
    assert isinstance(arrived, jax.Array) and arrived.dtype == jnp.float32
    np.testing.assert_array_equal(arrived, VALUES.astype(np.float32))


@pytest.mark.parametrize("dtype", ["?", "i1", ">i2", "<i4", ">i8", "u1", ">u8"])
def test_booleans_and_integers_become_floats(dtype):
    host = np.array([[0, 1], [1, 100]]).astype(dtype)
    arrived = to_device(host)
    assert arrived.dtype == jnp.float32
    np.testing.assert_array_equal(arrived, host.astype(np.float32))


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::-1],
        lambda a: a[:, ::-2],
        lambda a: a.T,
        lambda a: np.asfortranarray(a),
        lambda a: np.broadcast_to(a[0], (5, 4)),
        lambda a: a[1, 2],
        lambda a: a[:0],
    ],
)
@pytest.mark.parametrize("dtype", ["<f4", ">f8"])
def test_any_strides_and_shapes(view, dtype):
    host = view(VALUES.astype(dtype))
    arrived = to_device(host)
    assert arrived.shape == host.shape
    np.testing.assert_array_equal(arrived, host.astype(np.float32))


def test_later_changes_of_the_host_array_do_not_show():
    # 64-byte aligned float32 is what a CPU device would otherwise take over as it is.
    store = np.zeros(4096 + 16, np.float32)
    offset = (-store.ctypes.data % 64) // 4
    host = store[offset : offset + 4096]
    arrived = to_device(host)
    host += 1
    np.testing.assert_array_equal(arrived, np.zeros(4096))


def test_trees_keep_their_structure_and_numbers_are_arrays():
    tree = {"x": [np.ones(2), 3], "none": None, "pair": (True, 2.5)}
    arrived = to_device(tree)
    assert jax.tree.structure(arrived) == jax.tree.structure(tree)
    assert [leaf.dtype for leaf in jax.tree.leaves(arrived)] == [jnp.float32] * 4
    assert arrived["x"][1].shape == () and arrived["pair"][0] == 1.0


def test_device_arrays_pass_or_are_cast():
    x = jnp.arange(3, dtype=jnp.float32)
    assert to_device(x) is x
    assert to_device(jnp.arange(3)).dtype == jnp.float32
    assert to_device(x, jnp.bfloat16).dtype == jnp.bfloat16


def test_not_a_number_and_infinity_pass():
    arrived = np.asarray(to_device(np.array([np.nan, np.inf, -np.inf, 1e-50])))
    np.testing.assert_array_equal(arrived, np.float32([np.nan, np.inf, -np.inf, 0]))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.int32, jnp.uint8])
def test_other_dtypes_on_request(dtype):
    arrived = to_device(np.array([0, 1, 200], np.int64), dtype)
    assert arrived.dtype == dtype
    np.testing.assert_array_equal(np.asarray(arrived, np.int64), [0, 1, 200])


@pytest.mark.parametrize(
    ("tree", "dtype", "message"),
    [
        ({"a": np.ones(2, np.complex64)}, jnp.float32, r"leaf \['a'\] is complex64"),
        ([1.0, 2j], jnp.float32, r"leaf \[1\] is complex128, and devices get real"),
        (np.array(["a"]), jnp.float32, "must be numbers or booleans; got <U1"),
        (np.array([None]), jnp.float32, "got object"),
        (np.datetime64("2020-01-01"), jnp.float32, "got datetime64"),
        (np.ma.masked_equal([1.0, 2.0], 2.0), jnp.float32, r"masked.*filled"),
        (np.array([1e39]), jnp.float32, "too large for float32"),
        (np.array([1e5]), jnp.float16, "too large for float16"),
        (np.array([1.5]), jnp.int32, "is float64, and making it int32 would lose"),
        (np.array([2]), jnp.bool_, "is int64, and making it bool would lose"),
        (np.array([2**31]), jnp.int32, "too large for int32: 2147483648"),
        (np.array([-1]), jnp.uint8, "too large for uint8: -1"),
        (np.ones(2), jnp.complex64, "cannot make complex64.*ask for float32"),
        (np.ones(2), np.float64, "cannot make float64"),
        (np.ones(2), np.int64, "cannot make int64"),
    ],
)
def test_mistakes_are_told(tree, dtype, message):
    with pytest.raises(ValueError, match=message):
        to_device(tree, dtype)
