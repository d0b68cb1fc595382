"""Files that torch writes, and the real Darcy data of neuraloperator, against torch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from train.data import read_inputs, read_pairs  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize("channels_first", [False, True])
def test_files_of_torch(tmp_path, dtype, channels_first):
    torch.manual_seed(0)
    x = torch.randn(5, 12, 12, dtype=torch.float64)
    x = x > 0 if dtype == torch.bool else x.to(dtype)
    y = torch.randn(5, 12, 12)
    stored = {"x": x.unsqueeze(1) if channels_first else x, "y": y}
    torch.save(stored, tmp_path / "set.pt")
    pairs = read_pairs(tmp_path / "set.pt")
    assert pairs.inputs.dtype == pairs.targets.dtype == np.float32
    np.testing.assert_array_equal(pairs.inputs, x.float().unsqueeze(-1).numpy())
    np.testing.assert_array_equal(pairs.targets, y.unsqueeze(-1).numpy())


def test_views_bfloat16_and_parameters(tmp_path):
    whole = torch.randn(6, 3, 12, 12)
    stored = {
        "x": whole[::2].transpose(2, 3),  # strides of its own
        "y": torch.nn.Parameter(whole[:3, :1].to(torch.bfloat16)),
    }
    torch.save(stored, tmp_path / "set.pt")
    pairs = read_pairs(tmp_path / "set.pt")
    np.testing.assert_array_equal(pairs.inputs, stored["x"].permute(0, 2, 3, 1).numpy())
    np.testing.assert_array_equal(
        pairs.targets, stored["y"].detach().float().permute(0, 2, 3, 1).numpy()
    )


def test_complex_tensors_are_refused(tmp_path):
    torch.save({"x": torch.zeros(2, 8) + 1j, "y": torch.zeros(2, 8)}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="must be real, got complex"):
        read_pairs(tmp_path / "c.pt")


def test_inputs_alone(tmp_path):
    x = torch.randn(2, 3, 12, 12)
    torch.save({"x": x}, tmp_path / "set.pt")
    inputs = read_inputs(tmp_path / "set.pt", grid_ndim=2, num_channels=3)
    np.testing.assert_array_equal(inputs, x.permute(0, 2, 3, 1).numpy())
