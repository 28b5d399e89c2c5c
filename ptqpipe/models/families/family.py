"""What a row of the table of families says."""

from dataclasses import dataclass
from typing import NamedTuple

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


class Keep(NamedTuple):
    """Modules that stay as they are: a pattern of their names, and why.

    bits  formats of at least this many bits do quantize them; 0: none does
    """

    pattern: str
    reason: str
    bits: int = 0


@dataclass(frozen=True, slots=True)
class ReaderIssue:
    """A part of models that is not quantized like the rest.

    keep        its modules; ``{layers}`` in the pattern stands for the numbers that ``counted_by`` gives
    counted_by  the key of config.json with the number of layers behind the last of ``num_hidden_layers``
    symptom     which readers fail where it is quantized (with fewer bits than ``keep.bits``), and how; empty: none does
    unless_quantized  the readers fail instead where the part is kept, while modules of this pattern are quantized
    readers     those that fail, by their names in ``reader_facts.py``
    containers  the layouts in which they do; empty: all that other programs read
    formats     the formats in which they do, by their names in ``schemes.py``; empty: all
    by_default  kept unless a rule names it; else it concerns readers alone
    mtp         the part is the whole multi-token prediction layer: ``mtp`` of a conversion decides over it
    """

    keep: Keep
    counted_by: str = ""
    symptom: str = ""
    unless_quantized: str = ""
    readers: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    by_default: bool = True
    mtp: bool = False

    @property
    def unsupported(self) -> bool:
        """Neither vLLM nor SGLang gets it right."""
        return {"vllm", "sglang"} <= set(self.readers)


def fails(
    reader: str, pattern: str, what: str, symptom: str, *, bits: int = 0, containers: tuple[str, ...] = (),
    formats: tuple[str, ...] = (), unless_quantized: str = "",
) -> ReaderIssue:  # fmt: skip
    """The issue of one reader alone, for which nothing is kept unless a rule says so. Arguments as `ReaderIssue`'s."""
    return ReaderIssue(
        Keep(pattern, what, bits), symptom=symptom, unless_quantized=unless_quantized, readers=(reader,),
        containers=containers, formats=formats, by_default=False,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of a decoder layer, and what else transforms must know that move factors into and out of them.

    attention, mlp  leaf names of the norms whose output q, k, v and the MLP read: one name where both read one norm, ""
                    where they read the residual stream itself
    offset          the norm multiplies by (offset + weight): 1 for Gemma
    layer_norm      the norm subtracts the mean and adds a bias
    values          factors may move between values and the attention's output: no norm stands between, no other layer
                    reads the same values, and they are rows of their own
    outputs         norms between a sublayer and the residual stream: their weight stands in the way of rotations
    tied            a reader takes the embedding for the head whatever config.json says
    """

    attention: str = "input_layernorm"
    mlp: str = "post_attention_layernorm"
    offset: float = 0.0
    layer_norm: bool = False
    values: bool = True
    outputs: tuple[str, ...] = ()
    tied: bool = False


class Mtp(NamedTuple):
    """The names of a multi-token prediction layer's parts in checkpoints; ``{layer}``: how many other layers there are.

    block   its decoder layer
    join    the projection of an embedding and a state, in this order
    tokens  the norm of the embedding; ``states`` of the state; ``last`` of what the head then sees
    """

    block: str
    join: str
    tokens: str
    states: str
    last: str


class ModuleOutputs(NamedTuple):
    """A module of which readers build several outputs, one below the other: a block of scales must not lie in two.

    pattern  of its name
    rows     of each output, in order: keys of the language model's config whose product it is
    """

    pattern: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table.

    types        the values of ``model_type`` in config.json, at its top or in the language model's part
    issues       what is not quantized like the rest, beside `COMMON`
    fuse         leaf names that readers make one matrix of; a group takes the place of those of `DEFAULT_FUSE` that it
                 shares a name with
    interleaved  gate and up rows take turns in a stack of experts; else all rows of gate come first
    experts      what readers call gate, up and down projection of a single expert, where its stacks are not called
                 ``experts``; empty: they know its stacks alone
    norms        where factors may move; None: not known
    fixed        why none may
    mtp          its multi-token prediction layer, where this package runs it
    outputs      its modules of several outputs
    missing      readers that have no such model, by their names in ``reader_facts.py``
    """

    types: tuple[str, ...] = ()
    issues: tuple[ReaderIssue, ...] = ()
    fuse: tuple[tuple[str, ...], ...] = ()
    interleaved: bool = False
    experts: tuple[str, ...] = ()
    norms: Norms | None = None
    fixed: str = ""
    mtp: Mtp | None = None
    outputs: tuple[ModuleOutputs, ...] = ()
    missing: tuple[str, ...] = ()

    def single_experts(self, stack: str) -> tuple[str, ...]:
        """What readers call the weights of one expert of a stack, its modules with ``{}`` for the expert's number, in
        the order of their rows; empty where readers know the stack as a whole.

        stack  the module of the whole stack
        """
        parent, _, leaf = stack.rpartition(".")
        named = "experts" in parent.split(".")
        if not named and not self.experts:
            return ()
        gate, up, down = GATE_UP_DOWN if named else self.experts
        parts = {"gate_up_proj": (gate, up), "input_linear": (gate, up), "output_linear": (down,)}.get(leaf, (leaf,))
        return tuple(f"{parent}{'' if named else '.experts'}.{{}}.{part}" for part in parts)
