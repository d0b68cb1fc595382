"""Networks with factorised kernels against the dense ones they were made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.factorised import factorised

VOLUME = np.random.default_rng(0).normal(size=(1, 4, 6, 5, 1)).astype(np.float32)


def dense(kind, **arguments):
    model = kind(**arguments)
    return model, jax.jit(model.init)(jax.random.key(0), VOLUME)


MODELS = {
    "edsr": (models.EDSR3D, {"scale": (1, 2, 2), "hidden_channels": 3, "n_blocks": 1}),
    "flat": (models.EDSR3D, {"scale": (2, 1, 1), "hidden_channels": 2, "n_blocks": 1}),
    "unet": (models.UNet3D, {"hidden_channels": 2, "n_levels": 1}),
    "mdcsrn": (models.MDCSRN, {"n_blocks": 1, "n_units": 2, "growth": 2}),
}


@pytest.mark.parametrize("conv", ["separable", "2plus1d"])
@pytest.mark.parametrize("name", MODELS)
def test_full_rank_is_the_dense_network(name, conv):
    kind, arguments = MODELS[name]
    model, variables = dense(kind, **arguments)
    other, changed, errors = factorised(model, variables, conv, 1000)
    # The parameters are those that the other network makes itself.
    wanted = jax.eval_shape(other.init, jax.random.key(0), VOLUME)
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (changed, wanted)]
    assert shapes[0] == shapes[1]
    assert errors and max(errors.values()) < 1e-6
    expected = jax.jit(model.apply)(variables, VOLUME)
    output = jax.jit(other.apply)(changed, VOLUME)
    scale = np.abs(expected).max()
    # Rounding of a few layers in float32.
    np.testing.assert_allclose(output / scale, expected / scale, atol=3e-6)


def test_lower_ranks_err_as_they_say():
    kind, arguments = MODELS["edsr"]
    model, variables = dense(kind, **arguments)
    worst = []
    for rank in (1, 2, 3):
        _, changed, errors = factorised(model, variables, "separable", rank)
        kernel = np.asarray(variables["params"]["head"]["kernel"], np.float64)
        layer = changed["params"]["head"]
        product = np.einsum(
            "rtc,rijco->tijco", layer["depth_kernel"], layer["plane_kernel"]
        )
        error = np.linalg.norm(product - kernel) / np.linalg.norm(kernel)
        np.testing.assert_allclose(errors["head"], error, rtol=1e-4, atol=1e-7)
        worst.append(max(errors.values()))
    assert worst[0] > worst[1] > worst[2]


def test_a_model_that_is_factorised_already_and_another_one_are_refused():
    kind, arguments = MODELS["edsr"]
    model, variables = dense(kind, **arguments, conv="separable")
    with pytest.raises(ValueError, match="conv='separable'"):
        factorised(model, variables, "separable", 1)
    with pytest.raises(ValueError, match="FNO"):
        factorised(
            models.FNO1D(
                n_modes=(4,), in_channels=1, out_channels=1, hidden_channels=2
            ),
            {},
            "separable",
            1,
        )
