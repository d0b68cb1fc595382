"""Whole PyTorch networks: the order of their calls, the check of what they compute."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch_volume_networks import network  # noqa: E402
from volume_cases import CASES  # noqa: E402

from models import EDSR3D  # noqa: E402
from models.native_check import network_error  # noqa: E402
from models.torch_volumes import from_torch  # noqa: E402


def test_a_network_is_imported_in_the_order_of_its_calls():
    class Net(torch.nn.Module):
        """Its layers are made in another order than they are called in."""

        def __init__(self):
            super().__init__()
            self.tail, self.end = self.conv(3, 1), self.conv(3, 3)
            self.second, self.first = self.conv(3, 3), self.conv(3, 3)
            self.head = self.conv(1, 3)

        @staticmethod
        def conv(entering, leaving):
            return torch.nn.Conv3d(entering, leaving, 3, padding=1)

        def forward(self, x):
            h = self.head(x)
            y = h + self.second(torch.relu(self.first(h)))
            return self.tail(h + self.end(y))

    torch.manual_seed(0)
    net = Net().train()
    model = EDSR3D(hidden_channels=3, n_blocks=1, scale=1)
    lines = []
    variables = from_torch(net, model, report=lines.append)
    assert net.training  # as it was
    kernel = np.asarray(variables["params"]["blocks_0"]["conv_0"]["kernel"])
    weight = net.first.weight.detach().numpy()
    np.testing.assert_array_equal(np.moveaxis(kernel, (-1, -2), (0, 1)), weight)
    assert "PyTorch" in lines[1] and len(lines) == 3
    assert network_error(net, model, variables, (2, 3, 5, 4, 1)) < 1e-5
    with pytest.raises(ValueError, match="tail.weight has the shape"):
        from_torch(net.state_dict(), model, report=None)


def test_a_network_that_computes_something_else_is_warned_of():
    model = EDSR3D(hidden_channels=2, n_blocks=1, residual_scaling=0.5, scale=1)
    net = network(CASES["EDSR3D_plain"])
    model = model.clone(hidden_channels=4, n_blocks=2)
    with pytest.warns(UserWarning, match="computes something else"):
        from_torch(net, model, report=lambda line: None)


def test_a_network_of_another_scale_is_refused():
    net = network(CASES["EDSR3D_plain"])
    model = CASES["EDSR3D_plain"].make()
    variables = from_torch(net, model, report=None)
    finer = model.clone(scale=(1, 1, 1), out_channels=1)
    assert network_error(net, finer, variables) < 1e-5
    deeper = torch.nn.Sequential(net, torch.nn.Upsample(scale_factor=2))
    with pytest.raises(ValueError, match="they are not the same network"):
        network_error(deeper, model, variables)


def test_shared_layers_are_refused():
    conv = torch.nn.Conv3d(1, 1, 3, padding=1)
    net = torch.nn.Sequential(conv, torch.nn.ReLU(), conv)
    with pytest.raises(ValueError, match="calls 0 twice"):
        from_torch(net, EDSR3D(hidden_channels=1, n_blocks=1, scale=1))
