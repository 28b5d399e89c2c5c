"""A model whose results for a token do not depend, to the bit, on which other tokens are computed with it.

A sum of floats depends on its order, and a library chooses that by the number of rows. The compiled kernels do not: in
panels it depends on the columns alone (``kernels/cpu_linear.py``), in attention on the sequence alone. What is left is
to let nothing else multiply. Knows modules; must not know batches or caches.
"""

import torch

from ptqpipe.errors import UsageError
from ptqpipe.numerics.kernels import cpu_library, cpu_linear
from ptqpipe.runtime.compiled import use_kernels
from ptqpipe.runtime.linear import PackedLinear

_ANY_ROWS = 1 << 40


def make_batch_invariant(model: torch.nn.Module) -> None:
    """Gives a model the kernels whose sums have one order, in place. UsageError that names what has none.

    All linear layers that stayed float go to panels, if need be as a copy. NVFP4 takes 3 to 11 % longer from 32 rows
    on.
    """
    if not cpu_library.multiplies_bf16() or cpu_linear.limit(panels=True) < _ANY_ROWS:
        raise UsageError(
            "--batch-invariant needs a CPU with AVX512-BF16 and VBMI, and without AMX, whose products are torch's; "
            "serve without it"
        )
    use_kernels(model, every=True)
    for name, module in model.named_modules():
        reason = _keep_order(module)
        if reason is not None:
            raise UsageError(
                f"--batch-invariant: {name} ({type(module).__name__}) {reason}, so its sums may depend on the rest "
                "of a batch; serve without it"
            )


def _keep_order(module: torch.nn.Module) -> str | None:
    """Why a module may compute otherwise with other rows; None where it does not."""
    if isinstance(module, PackedLinear):
        if module.packed.operand is None:
            return f"has no kernel here for {module.packed.fmt.name}"
        if module.quantizer is not None and module.quantizer.rotation:
            return "has rotated inputs"
        module.packed.operand.keep_order()
        return None
    if isinstance(module, torch.nn.Linear):
        return None if module.weight is None else "is multiplied by torch"
    if isinstance(module, torch.nn.Embedding) or "Norm" in type(module).__name__:
        return None  # rows that are copied, or summed each on its own
    own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() > 1]
    return f"multiplies its {own[0]} by torch" if own else None
