"""The volume networks in PyTorch, written from their papers with native ``nn.Conv3d``.

Names differ from ours on purpose; layers stand in the order in which they are called.
"""

import math

import torch
from torch import nn
from torch.nn import functional
from volume_cases import Case


def conv3(entering, leaving, kind="exact", middle=None, kernel=(3, 3, 3)):
    depth, *plane = kernel
    pad = [size // 2 for size in kernel]
    if kind == "exact" or depth == 1:
        return nn.Conv3d(entering, leaving, kernel, padding=pad)
    along = {"kernel_size": (depth, 1, 1), "padding": (pad[0], 0, 0)}
    across = {"kernel_size": (1, *plane), "padding": (0, *pad[1:])}
    if kind == "separable":
        return nn.Sequential(
            nn.Conv3d(entering, entering, **along, groups=entering, bias=False),
            nn.Conv3d(entering, leaving, **across),
        )
    middle = middle or leaving
    return nn.Sequential(
        nn.Conv3d(entering, middle, **across), nn.Conv3d(middle, leaving, **along)
    )


class Shuffle(nn.Module):
    """einops: b (c rd rh rw) d h w -> b c (d rd) (h rh) (w rw)."""

    def __init__(self, factors):
        super().__init__()
        self.factors = factors

    def forward(self, x):
        rd, rh, rw = self.factors
        b, c, d, h, w = x.shape
        x = x.reshape(b, -1, rd, rh, rw, d, h, w).permute(0, 1, 5, 2, 6, 3, 7, 4)
        return x.reshape(b, -1, d * rd, h * rh, w * rw)


class PlaneShuffle(Shuffle):
    """nn.PixelShuffle on each slice, for factors (1, r, r)."""

    def forward(self, x):
        b, _, d, *_ = x.shape
        x = functional.pixel_shuffle(x.transpose(1, 2).flatten(0, 1), self.factors[1])
        return x.unflatten(0, (b, d)).transpose(1, 2)


class Linear(nn.Module):
    """Trilinear interpolation, half-pixel centres."""

    def __init__(self, factors):
        super().__init__()
        self.factors = tuple(map(float, factors))

    def forward(self, x):
        return functional.interpolate(
            x, scale_factor=self.factors, mode="trilinear", align_corners=False
        )


class Cubic(nn.Module):
    """Bicubic interpolation of each slice; depth is not scaled."""

    def __init__(self, factors):
        super().__init__()
        assert factors[0] == 1
        self.factors = tuple(map(float, factors[1:]))

    def forward(self, x):
        b, c = x.shape[:2]
        x = functional.interpolate(
            x.flatten(0, 2)[:, None], scale_factor=self.factors, mode="bicubic",
            align_corners=False,
        )  # fmt: skip
        return x.reshape(b, c, -1, *x.shape[2:])


def upsampler(channels, model):
    points = math.prod(model.scale)
    if points == 1:
        return nn.Identity()
    if model.upsampler == "linear":
        return nn.Sequential(Linear(model.scale), conv3(channels, channels, model.conv))
    flat = model.scale[1:] == (1, 1)
    kernel = (1, 3, 3) if flat else (3, 3, 3)
    square = model.scale[0] == 1 and model.scale[1] == model.scale[2]
    return nn.Sequential(
        conv3(channels, channels * points, model.conv, channels, kernel),
        (PlaneShuffle if square else Shuffle)(model.scale),
    )


class AddInput(nn.Module):
    """The network's output plus the interpolated input."""

    def __init__(self, net, model):
        super().__init__()
        self.net = net
        kind = {"linear": Linear, "cubic": Cubic}.get(model.input_skip)
        self.skip = kind and kind(model.scale)

    def forward(self, x):
        return self.net(x) + self.skip(x) if self.skip else self.net(x)


class Residual(nn.Sequential):
    factor = 1.0

    def forward(self, x):
        return x + self.factor * super().forward(x)


class Squeeze(nn.Module):
    def __init__(self, channels, reduction):
        super().__init__()
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool3d(1),
            nn.Conv3d(channels, channels // reduction, 1),
            nn.ReLU(),
            nn.Conv3d(channels // reduction, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return x * self.weigh(x)


class RCAN(nn.Module):
    def __init__(self, m):
        super().__init__()
        c = m.hidden_channels

        def block():
            return Residual(
                conv3(c, c, m.conv), nn.ReLU(), conv3(c, c, m.conv),
                Squeeze(c, m.reduction),
            )  # fmt: skip

        groups = [
            Residual(*(block() for _ in range(m.n_blocks)), conv3(c, c, m.conv))
            for _ in range(m.n_groups)
        ]
        self.first = conv3(m.in_channels, c, m.conv)
        self.body = Residual(*groups, conv3(c, c, m.conv))
        self.up = upsampler(c, m)
        self.last = conv3(c, m.out_channels, m.conv)

    def forward(self, x):
        return (self.last(self.up(self.body(self.first(2 * x - 1)))) + 1) / 2


class EDSR(nn.Sequential):
    def __init__(self, m):
        c = m.hidden_channels

        def block():
            block = Residual(conv3(c, c, m.conv), nn.ReLU(), conv3(c, c, m.conv))
            block.factor = m.residual_scaling or 1.0
            return block

        super().__init__(
            conv3(m.in_channels, c, m.conv),
            Residual(*(block() for _ in range(m.n_blocks)), conv3(c, c, m.conv)),
            upsampler(c, m),
            conv3(c, m.out_channels, m.conv),
        )


class UNet(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.pool, self.factor = m.pool, [p**m.n_levels for p in m.pool]

        def level(*channels):
            layers = []
            for entering, leaving in zip(channels[:-1], channels[1:], strict=True):
                layers += [conv3(entering, leaving, m.conv), nn.ReLU()]
            return nn.Sequential(*layers)

        c, entering = m.hidden_channels, m.in_channels
        self.encoder = nn.ModuleList()
        for i in range(m.n_levels):
            self.encoder.append(level(entering, c * 2**i, c * 2**i))
            entering = c * 2**i
        self.bottom = level(entering, c * 2**m.n_levels, entering)
        self.decoder = nn.ModuleList()
        for i in reversed(range(m.n_levels)):
            self.decoder.append(level(2 * c * 2**i, c * 2**i, c * 2 ** max(0, i - 1)))
        self.up = upsampler(c, m)
        self.last = nn.Conv3d(c, m.out_channels, 1)

    def forward(self, x):
        grid = x.shape[2:]
        pads = [(0, -n % f) for n, f in zip(grid, self.factor, strict=True)]
        x = functional.pad(x, [p for pad in pads[::-1] for p in pad], mode="replicate")
        kept = []
        for level in self.encoder:
            kept.append(level(x))
            x = functional.max_pool3d(kept[-1], self.pool)
        x = self.bottom(x)
        for level in self.decoder:
            x = functional.interpolate(x, size=kept[-1].shape[2:], mode="nearest")
            x = level(torch.cat([x, kept.pop()], dim=1))
        return self.last(self.up(x[:, :, : grid[0], : grid[1], : grid[2]]))


class Dense(nn.Module):
    def __init__(self, channels, m):
        super().__init__()
        norm = [nn.BatchNorm3d(channels)] if m.norm else []
        self.unit = nn.Sequential(*norm, nn.ELU(), conv3(channels, m.growth, m.conv))

    def forward(self, x):
        return torch.cat([x, self.unit(x)], dim=1)


class MDCSRN(nn.Module):
    def __init__(self, m):
        super().__init__()
        k, units = m.growth, range(m.n_units)
        self.first = conv3(m.in_channels, 2 * k, m.conv)
        self.blocks, width = nn.ModuleList(), 2 * k
        for i in range(m.n_blocks):
            squeeze = [nn.Conv3d(width, 2 * k, 1)] if i else []
            dense = (Dense(2 * k + j * k, m) for j in units)
            self.blocks.append(nn.Sequential(*squeeze, *dense))
            width += 2 * k + m.n_units * k
        self.up = nn.Sequential()
        if m.scale != (1, 1, 1):
            self.up = nn.Sequential(nn.Conv3d(width, 2 * k, 1), upsampler(2 * k, m))
            width = 2 * k
        self.last = nn.Conv3d(width, m.out_channels, 1)

    def forward(self, x):
        outputs = [self.first(x)]
        for block in self.blocks:
            outputs.append(block(torch.cat(outputs, dim=1)))
        return self.last(self.up(torch.cat(outputs, dim=1)))


class Attend(nn.Module):
    """PyTorch's attention over depth, with a matrix of depth x depth and a mask."""

    def __init__(self, c, m):
        super().__init__()
        self.heads, self.window = m.n_heads, m.depth_window
        self.query, self.key, self.value = (nn.Linear(c, c) for _ in range(3))
        self.out = nn.Linear(c, c)
        self.relative_bias = nn.Parameter(
            torch.zeros(2 * m.depth_window + 1, m.n_heads)
        )

    def forward(self, x):  # b c d h w
        b, _, d, h, w = x.shape
        x = x.permute(0, 3, 4, 2, 1).flatten(0, 2)  # (b h w) d c
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        offset = torch.arange(d)[None, :] - torch.arange(d)[:, None]
        near = offset.abs() <= self.window
        bias = self.relative_bias[offset.clamp(-self.window, self.window) + self.window]
        bias = bias.permute(2, 0, 1).masked_fill(~near, -math.inf)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        y = self.out(y.transpose(1, 2).flatten(2))
        return y.unflatten(0, (b, h, w)).permute(0, 4, 3, 1, 2)


class Gate(nn.Module):
    def __init__(self, c, m):
        super().__init__()
        w = m.depth_window
        self.gate, self.value = nn.Conv3d(c, c, 1), nn.Conv3d(c, c, 1)
        self.along = nn.Conv3d(
            c, c, (2 * w + 1, 1, 1), padding=(w, 0, 0), groups=c, bias=False
        )
        self.out = nn.Conv3d(c, c, 1)

    def forward(self, x):
        return self.out(self.along(torch.sigmoid(self.gate(x)) * self.value(x)))


class NormedOver(nn.Module):
    def __init__(self, channels, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(channels), inner

    def forward(self, x):
        return self.inner(self.norm(x.movedim(1, -1)).movedim(-1, 1))


class DepthAttention(nn.Sequential):
    def __init__(self, m):
        c = m.hidden_channels
        mixing = {"attention": Attend, "gate": Gate}[m.mixing]
        plane = {"kernel": (1, 3, 3)}
        blocks = []
        for _ in range(m.n_blocks):
            blocks.append(
                Residual(conv3(c, c, **plane), nn.ReLU(), conv3(c, c, **plane))
            )
            blocks.append(Residual(NormedOver(c, mixing(c, m))))
        super().__init__(
            conv3(m.in_channels, c, m.conv),
            Residual(*blocks, conv3(c, c, m.conv)),
            upsampler(c, m),
            conv3(c, m.out_channels, m.conv),
        )


NETWORKS = {
    "RCAN3D": RCAN,
    "EDSR3D": EDSR,
    "UNet3D": UNet,
    "MDCSRN": MDCSRN,
    "DepthAttentionSR": DepthAttention,
}


def network(case: Case) -> nn.Module:
    """The PyTorch network of a case."""
    model = case.make()
    return AddInput(NETWORKS[case.model](model), model)
