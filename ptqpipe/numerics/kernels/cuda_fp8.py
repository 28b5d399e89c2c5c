"""Products of E4M3 codes with E4M3 codes: ``torch._scaled_mm``, where the device multiplies them.

From compute capability 8.9 on (Ada, Hopper, Blackwell), for shapes in multiples of 16. The sums are the device's:
torch asks for the slow accumulation, whose error NVIDIA does not state. torch has the same function on a CPU, which is
how this one is tested without a GPU; an H100 has run it.

Knows tensors; must not know formats, modules or how inputs are quantized.
"""

from functools import cache

import torch

CAPABILITY = (8, 9)
_MULTIPLE = 16  # of rows and columns of a weight, which _scaled_mm asks for


def fits(device: torch.device, shape: tuple[int, int]) -> bool:
    """Whether `scaled_mm_linear` is fast on ``device`` for a weight of this ``shape [N, K]``."""
    return device.type == "cuda" and not any(extent % _MULTIPLE for extent in shape) and _capable(device)


@cache
def _capable(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= CAPABILITY


def scaled_mm_linear(
    codes: torch.Tensor,
    scales: torch.Tensor,
    data: torch.Tensor,
    factor: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """bfloat16 ``[M, N]``: ``(codes * scales) @ (data * factor).T + bias``, rounded after the sums and the factors.

    codes   float8_e4m3fn ``[M, K]``, contiguous; scales float32 ``[M, 1]``
    data    uint8 ``[N, K]``, contiguous; factor float32 ``[1]`` or ``[N]``
    bias    ``[N]`` of any float dtype; in bfloat16 it is added before the rounding
    """
    inside = bias if bias is not None and bias.dtype == torch.bfloat16 else None
    y: torch.Tensor = torch._scaled_mm(
        codes,
        data.view(torch.float8_e4m3fn).t(),
        scale_a=scales,
        scale_b=factor.expand(data.shape[0]).reshape(1, -1).contiguous(),
        bias=inside,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return y if bias is None or inside is not None else (y.float() + bias.float()).to(torch.bfloat16)
