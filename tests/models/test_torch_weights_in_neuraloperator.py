"""Weights from live neuraloperator models and the files they save, and back to them.

tests/parity has the options one by one; here are the ways that models are made, kept
and wrapped in torch. Outputs are compared, as a wrong argument shows there alone.
"""

import copy

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("neuralop")

from neuralop.layers.embeddings import GridEmbedding2D, GridEmbeddingND  # noqa: E402
from neuralop.models import FNO as TorchFNO  # noqa: E402
from neuralop.models import TFNO, UNO  # noqa: E402

from models import FNO  # noqa: E402
from models.torch_weights import from_neuralop, to_neuralop  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # neuraloperator's own
BASE = {"in_channels": 2, "out_channels": 1, "hidden_channels": 4, "n_layers": 2}
MADE = {
    "keywords": lambda: TorchFNO(n_modes=(4, 4), **BASE),
    "positional": lambda: TorchFNO((4, 5), 2, 1, 4, 2, 3),
    "lists": lambda: TorchFNO([4, 4], **BASE, domain_padding=[0.0, 0.25]),
    "gelu module": lambda: TorchFNO((4, 4), **BASE, non_linearity=torch.nn.GELU()),
    "torch.tanh": lambda: TorchFNO((4, 4), **BASE, non_linearity=torch.tanh),
    "relu": lambda: TorchFNO((4, 4), **BASE, non_linearity=torch.nn.functional.relu),
    "grid module": lambda: TorchFNO(
        (4, 4), **BASE, positional_embedding=GridEmbedding2D(in_channels=2)
    ),
    "nd grid module": lambda: TorchFNO(
        (4, 4), **BASE, positional_embedding=GridEmbeddingND(in_channels=2, dim=2)
    ),
    "padding in a tuple": lambda: TorchFNO((4, 4), **BASE, domain_padding=(0.5, 0.5)),
    "batch norm": lambda: TorchFNO((4, 4), **BASE, norm="batch_norm"),
    "dense": lambda: TorchFNO((4, 4), **BASE, factorization="Dense", rank=0.5),
}


def outputs(theirs, model, variables):
    x = np.random.default_rng(0).standard_normal((2, 8, 10, 2)).astype(np.float32)
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(x.transpose(0, 3, 1, 2).copy()))
    return jax.jit(model.apply)(variables, x), np.moveaxis(expected.numpy(), 1, -1)


def assert_same_output(theirs, model, variables):
    output, expected = outputs(theirs, model, variables)
    # As in tests/parity: 1e-6 is seen over a few float32 layers.
    np.testing.assert_allclose(output, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", MADE)
def test_models_however_made(name, tmp_path):
    """Live, with torch's objects in the metadata, and from the files it saves."""
    theirs = MADE[name]()
    model, variables = from_neuralop(theirs.state_dict())
    assert_same_output(theirs, model, variables)
    theirs.save_checkpoint(tmp_path, "a")
    saved, saved_variables = from_neuralop(tmp_path / "a_state_dict.pt")
    assert saved == model
    same = jax.tree.map(np.array_equal, variables, saved_variables)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("name", ["keywords", "batch norm", "lists", "gelu module"])
def test_what_we_export_is_loaded(name, tmp_path):
    theirs = MADE[name]()
    model, variables = from_neuralop(theirs.state_dict())
    state = to_neuralop(model, variables, tmp_path / "b")
    loaded = TorchFNO.from_checkpoint(tmp_path, "b")
    assert_same_output(loaded, model, variables)
    for key, tensor in theirs.state_dict().items():
        if key != "_metadata":
            assert torch.equal(tensor, loaded.state_dict()[key]), key
    theirs.load_state_dict(
        {k: v if k == "_metadata" else torch.as_tensor(v) for k, v in state.items()}
    )


def test_models_that_are_wrapped(tmp_path):
    theirs = MADE["keywords"]()

    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fno = copy.deepcopy(theirs)
            self.fc0 = torch.nn.Linear(2, 2)

    parallel = torch.nn.DataParallel(Wrapper())
    checkpoint = {"epoch": 1, "model_state": parallel.state_dict()}
    assert_same_output(theirs, *from_neuralop(checkpoint))
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    assert_same_output(theirs, *from_neuralop(tmp_path / "checkpoint.pt"))


def test_live_tensors_of_other_types():
    theirs = MADE["keywords"]()
    state = theirs.state_dict()
    state["lifting.fcs.0.bias"] = state["lifting.fcs.0.bias"].bfloat16()
    state["lifting.fcs.1.bias"] = torch.nn.Parameter(state["lifting.fcs.1.bias"])
    key = "fno_blocks.convs.0.weight.tensor"
    state[key] = state[key].conj()
    model, variables = from_neuralop(state)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {np.dtype("float32")}
    exported = to_neuralop(model, variables)
    np.testing.assert_array_equal(exported[key], state[key].resolve_conj().numpy())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: TFNO((4, 4), **BASE), "factorised"),
        (lambda: TorchFNO((4, 4), **BASE, separable=True), "separable=True"),
        (lambda: TorchFNO((4, 4), **BASE, complex_data=True), "complex_data=True"),
        (lambda: TorchFNO((4, 4), **BASE, non_linearity=torch.nn.PReLU()), "PReLU"),
        (
            lambda: UNO(
                2, 1, 4, n_layers=3, uno_out_channels=[4, 4, 4],
                uno_n_modes=[[4, 4]] * 3, uno_scalings=[[1, 1]] * 3,
                channel_mlp_skip="linear",
            ),
            "not those of an FNO",
        ),
    ],
)  # fmt: skip
def test_other_models_are_told(make, text, tmp_path):
    theirs = make()
    with pytest.raises(ValueError, match=text):
        from_neuralop(theirs.state_dict())
    torch.save(theirs.state_dict(), tmp_path / "a_state_dict.pt")
    with pytest.raises(ValueError, match=text):
        from_neuralop(tmp_path / "a")


def test_a_pickled_model_is_told(tmp_path):
    torch.save(MADE["keywords"](), tmp_path / "model.pt")
    with pytest.raises(ValueError, match="save model.state_dict"):
        from_neuralop(tmp_path / "model.pt")


def test_defaults_are_the_same():
    """Both with only the required arguments."""
    model, _ = from_neuralop(TorchFNO((4, 4), 1, 1, 4).state_dict())
    assert model == FNO((4, 4), 1, 1, 4)
