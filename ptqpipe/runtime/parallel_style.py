"""transformers' own tensor parallelism with our sums: a row-wise style for its plans, under a name of its own.

    name = register_rowwise(QuantAllReduce(group))
    plan = {"model.layers.*.self_attn.o_proj": name, "model.layers.*.mlp.down_proj": name}
    AutoModelForCausalLM.from_pretrained(CKPT, distributed_config=DistributedConfig(tp_size=2, tp_plan=plan))

For models that transformers cuts itself; `ptqpipe.runtime.load` cuts them without it. Embeddings have a style of their
own and stay as they are: their sums have one summand.
"""

from collections.abc import Callable
from typing import Any

import torch

from ptqpipe.errors import UsageError

NAME = "rowwise_quantized"


def register_rowwise(reduce: Callable[[torch.Tensor], torch.Tensor], *, name: str = NAME) -> str:
    """Makes ``reduce`` what joins the outputs of layers whose plan says ``name``. Returns the name.

    reduce  the partial output ``[..., hidden]`` to its sum over the group; may write to it
    name    "rowwise" replaces transformers' own style, for every model loaded from then on
    Raises UsageError without a transformers whose plans have styles.
    """
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError:
        raise UsageError(
            "tensor parallelism by transformers needs transformers 5.23 or newer; install it, or use "
            "ptqpipe.runtime.load(tp=...)"
        ) from None
    ALL_PARALLEL_STYLES.register(name, _style(reduce))
    return name


def _style(reduce: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A RowwiseParallel whose outputs at inference go through ``reduce``; with gradients it is transformers' own."""
    from torch.distributed.tensor import DTensor, Replicate
    from transformers.distributed.tensor_parallel import RowwiseParallel

    class Rowwise(RowwiseParallel):  # type: ignore[misc]  # transformers has no types here
        def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
            local = self.should_use_local_tensors(module) and isinstance(self.output_layouts, Replicate)
            if not local or isinstance(output, DTensor) or output.requires_grad:
                return super().transform_output_post_forward(module, output, mesh)
            total = reduce(output.contiguous())
            bias = module._parameters.get("bias")
            if bias is None:
                return total
            return total + (bias.to_local() if isinstance(bias, DTensor) else bias)

    return Rowwise()
