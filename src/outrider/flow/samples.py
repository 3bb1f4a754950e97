"""Does a module treat every sample alone? Then many calls may be one call with a larger batch.

Decides by known types only; a module of your own says `treats_samples_alone = True`. Asked by maps and switches.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_LAYERS = (
    nn.Identity, nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Unflatten,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
    nn.Upsample, nn.PixelShuffle, nn.PixelUnshuffle, nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d,
    nn.Dropout, nn.Dropout2d, nn.AlphaDropout,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Softsign, nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid,
    nn.GRUCell, nn.RNNCell, nn.LSTMCell,
    nn.Sequential, nn.ModuleList, nn.ModuleDict,
)  # fmt: skip


def treats_samples_alone(module: nn.Module) -> bool:
    """True where no part of a module lets one sample of a batch change another's result."""
    return all(_is_alone(part) for part in module.modules())


def mixes_samples(module: nn.Module) -> bool:
    """True where a batch's statistics reach its samples: batch normalisation."""
    return any(isinstance(part, _BatchNorm) for part in module.modules())


def _is_alone(part: nn.Module) -> bool:
    if isinstance(part, nn.Flatten):
        return part.start_dim >= 1
    if isinstance(part, nn.Softmax | nn.LogSoftmax):
        return part.dim not in (None, 0)
    return type(part) in _LAYERS or bool(getattr(part, "treats_samples_alone", False))
