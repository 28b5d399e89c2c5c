"""Finds the edges of a model from the names and shapes of its tensors.

A tensor of a layer that is not understood could read the same channels, so it is an error, never ignored. Knows
names and shapes; must not know files, formats or statistics.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.families import FAMILIES, Norms, family_of
from ptqpipe.transforms.structure import Edge, Matrix, Norm, Shapes, Structure

_LAYER = re.compile(r"(?P<layer>(?:.*\.)?(?:layers|h)\.\d+)\.(?P<leaf>.+)")
_EMBEDDINGS = re.compile(r"(?:.*\.)?(embed_tokens|wte|wpe)\.weight")
_HEAD = "lm_head.weight"
_FINAL = re.compile(r"(?:.*\.)?(norm|ln_f)\.(weight|bias)")
# Tensors of a layer that read no channel of an edge: norms of queries and keys, constants.
_HARMLESS = re.compile(r"(self_attn\.(q_norm|k_norm)\.weight|.*rotary_emb\.inv_freq|attn\.(masked_)?bias)")
_EXPERT = re.compile(r"(?P<moe>mlp|block_sparse_moe)\.experts\.(?P<e>\d+)\.(?P<part>\w+)\.weight")
_EXPERT_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def find_structure(tensors: Shapes, config: Mapping[str, Any]) -> Structure:
    """The edges of a plain checkpoint. UsageError for a family whose norms the table does not have, CheckpointError for
    one whose tensors are not the ones that its name promises."""
    model_type = str(config.get("model_type"))
    norms = family_of(config).norms
    if norms is None:
        known = [name for family in FAMILIES if family.norms is not None for name in family.types]
        raise UsageError(
            f"where factors may move is not known for the architecture {model_type!r}; known are "
            f"{', '.join(known)}; convert this model without a transform"
        )
    finder = _Finder(tensors, config, norms, model_type)
    layers: dict[str, dict[str, str]] = {}
    for name in tensors:
        match = _LAYER.fullmatch(name)
        if match is not None:
            layers.setdefault(match["layer"], {})[match["leaf"]] = name
    if not layers:
        raise CheckpointError(f"a {model_type} has layers, but no tensor is called ...layers.0.<name>; check the files")
    for layer, leaves in layers.items():
        (finder.gpt2_layer if model_type == "gpt2" else finder.layer)(layer, leaves)
    finder.ends()
    return finder.result()


@dataclass(slots=True)
class _Finder:
    """Collects edges; every tensor that it understands is struck off ``seen``."""

    tensors: Shapes
    config: Mapping[str, Any]
    norms: Norms
    model_type: str
    edges: list[Edge] = field(default_factory=list)
    writers: list[Matrix] = field(default_factory=list)
    output_norms: list[str] = field(default_factory=list)
    embeddings: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    @property
    def hidden(self) -> int:
        """Channels of the residual stream."""
        return self.number("hidden_size") or self.number("n_embd")

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        said = self.config.get("tie_word_embeddings")
        return self.norms.tied if said is None else bool(said)

    def number(self, key: str) -> int:
        """A count from the config, 0 where it is absent."""
        value = self.config.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    def matrix(
        self, name: str, *, group: str = "", rows: tuple[int, int] | None = None, transposed: bool = False
    ) -> Matrix:
        """A 2-D weight, or its rows [start, stop)."""
        shape = self.tensors[name][1]
        if len(shape) != 2:
            raise CheckpointError(f"'{name}' has the shape {list(shape)}, expected a matrix")
        n, k = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
        start, stop = rows or (0, n)
        module = name.removesuffix(".weight")
        bias = f"{module}.bias" if f"{module}.bias" in self.tensors else None
        self.seen.update([name, *([bias] if bias else [])])
        return Matrix(
            name, (stop - start, k), start=start, transposed=transposed, bias=bias, modules=(module,), group=group
        )

    def norm(self, layer: str, leaf: str) -> Norm:
        """The norm called ``leaf``. CheckpointError where it is missing."""
        prefix = f"{layer}.{leaf}" if layer else leaf
        name, bias = f"{prefix}.weight", f"{prefix}.bias"
        if name not in self.tensors:
            raise CheckpointError(f"a {self.model_type} has '{name}', but the checkpoint does not; check the files")
        self.seen.add(name)
        has_bias = bias in self.tensors
        self.seen.update([bias] if has_bias else [])
        return Norm(name, self.norms.offset, bias if has_bias else None)

    def layer(self, layer: str, leaves: Mapping[str, str]) -> None:
        """The edges of a Llama-like layer."""
        need = [f"self_attn.{leaf}_proj.weight" for leaf in "qkvo"]
        missing = next((leaf for leaf in need if leaf not in leaves), None)
        if missing is not None:
            raise CheckpointError(f"a {self.model_type} has '{layer}.{missing}', but the checkpoint does not")
        q, k, v = (self.matrix(leaves[leaf], group="qkv") for leaf in need[:3])
        o = self.matrix(leaves[need[3]])
        norm = self.norm(layer, self.norms.attention)
        self.add(Edge(f"{layer}.qkv", "norm", norm, (q, k, v), q.shape[1]))
        self.add(self.value_edge(f"{layer}.value", v, o))
        self.writers.append(o)
        self.mlp(layer, leaves)
        for name in self.norms.outputs:
            self.output_norms.append(self.norm(layer, name).weight)
        self.reject_unknown(layer, leaves)

    def value_edge(self, edge: str, v: Matrix, o: Matrix) -> Edge:
        """v -> o with the grouping of heads. CheckpointError where the shapes do not group."""
        heads = self.number("num_attention_heads") or self.number("n_head")
        head_dim = o.shape[1] // heads if heads and o.shape[1] % heads == 0 else 0
        if not head_dim or v.shape[0] % head_dim or heads % (v.shape[0] // head_dim):
            raise CheckpointError(
                f"'{v.tensor}' has {v.shape[0]} values and '{o.tensor}' reads {o.shape[1]}, which {heads} attention "
                "heads cannot group; check config.json"
            )
        return Edge(edge, "value", v, (o,), v.shape[0], repeat=o.shape[1] // v.shape[0], head_dim=head_dim)

    def mlp(self, layer: str, leaves: Mapping[str, str]) -> None:
        """norm -> everything that reads it, and up -> down of each expert."""
        readers: list[Matrix] = []
        ups: list[tuple[str, Matrix, Matrix]] = []
        for prefix in ("mlp", "mlp.shared_expert"):
            if f"{prefix}.gate_proj.weight" in leaves:
                gate, up = (self.matrix(leaves[f"{prefix}.{p}_proj.weight"], group=prefix) for p in ("gate", "up"))
                readers += [gate, up]
                ups.append((prefix, up, self.matrix(leaves[f"{prefix}.down_proj.weight"])))
        for leaf in ("mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.shared_expert_gate.weight"):
            if leaf in leaves:
                router = self.matrix(leaves[leaf])
                readers.append(Matrix(router.tensor, router.shape, bias=router.bias, quantized=False))
        for e, parts in self.experts(leaves).items():
            readers += [parts["gate"], parts["up"]]
            ups.append((f"experts.{e}", parts["up"], parts["down"]))
        for e, fused, up, down in self.stacks(leaves):
            readers.append(fused)
            ups.append((f"experts.{e}", up, down))
        if not ups:
            raise CheckpointError(f"'{layer}' has no gate_proj, up_proj and down_proj; check the files")
        norm = self.norm(layer, self.norms.mlp)
        self.add(Edge(f"{layer}.gate_up", "norm", norm, tuple(readers), readers[0].shape[1]))
        for name, up, down in ups:
            self.add(Edge(f"{layer}.{name}.up", "up", up, (down,), up.shape[0]))
            self.writers.append(down)

    def experts(self, leaves: Mapping[str, str]) -> dict[int, dict[str, Matrix]]:
        """Experts with weights of their own, by number."""
        found: dict[int, dict[str, Matrix]] = {}
        for leaf, name in leaves.items():
            match = _EXPERT.fullmatch(leaf)
            part = _EXPERT_PARTS.get(match["part"]) if match else None
            if match is not None and part is not None:
                found.setdefault(int(match["e"]), {})[part] = self.matrix(name, group=f"experts.{match['e']}")
        for e, parts in found.items():
            if len(parts) != 3:
                raise CheckpointError(f"expert {e} has {sorted(parts)}, expected gate, up and down; check the files")
        return dict(sorted(found.items()))

    def stacks(self, leaves: Mapping[str, str]) -> Iterable[tuple[int, Matrix, Matrix, Matrix]]:
        """Experts in 3-D stacks: (number, gate_up, its up half, down)."""
        names = [next((leaves[x] for x in (leaf, f"{leaf}.weight") if x in leaves), None) for leaf in _STACKS]
        if names[0] is None or names[1] is None:
            return
        fused, down = (self.tensors[name][1] for name in (names[0], names[1]))
        if len(fused) != 3 or len(down) != 3 or fused[1] != 2 * down[2] or fused[2] != down[1] != down[2]:
            raise UsageError(
                f"'{names[0]}' {list(fused)} beside {list(down)} is not a stack [experts, 2 x inner, hidden]; "
                "convert this model without a transform"
            )
        self.seen.update([names[0], names[1]])
        base = names[0].removesuffix(".weight").rpartition(".")[0]
        for e in range(fused[0]):
            split = tuple(f"{base}.{e}.{part}_proj" for part in ("gate", "up"))
            gate_up = Matrix(
                names[0], (fused[1], fused[2]), expert=e, modules=(f"{base}.gate_up_proj[{e}]", *split),
                group=f"experts.{e}",
            )  # fmt: skip
            up = Matrix(names[0], (down[2], fused[2]), start=down[2], expert=e)
            modules = (f"{base}.down_proj[{e}]", f"{base}.{e}.down_proj")
            yield e, gate_up, up, Matrix(names[1], (down[1], down[2]), expert=e, modules=modules)

    def gpt2_layer(self, layer: str, leaves: Mapping[str, str]) -> None:
        """The edges of a GPT-2 layer: weights are [in, out], q, k and v are one matrix, and the MLP is not gated."""
        need = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
        missing = next((leaf for leaf in need if leaf not in leaves), None)
        if missing is not None:
            raise CheckpointError(f"a gpt2 has '{layer}.{missing}', but the checkpoint does not; check the files")
        qkv, o, fc, down = (self.matrix(leaves[leaf], transposed=True) for leaf in need)
        third = qkv.shape[0] // 3
        v = self.matrix(leaves[need[0]], rows=(2 * third, qkv.shape[0]), transposed=True)
        self.add(Edge(f"{layer}.qkv", "norm", self.norm(layer, "ln_1"), (qkv,), qkv.shape[1]))
        self.add(self.value_edge(f"{layer}.value", v, o))
        self.add(Edge(f"{layer}.fc", "norm", self.norm(layer, "ln_2"), (fc,), fc.shape[1]))
        self.writers += [o, down]
        self.reject_unknown(layer, leaves)

    def reject_unknown(self, layer: str, leaves: Mapping[str, str]) -> None:
        """CheckpointError for a tensor of a layer that is not understood: it could read the same channels."""
        for leaf, name in leaves.items():
            if _HARMLESS.fullmatch(leaf):
                self.seen.add(name)
            if name not in self.seen:
                raise CheckpointError(
                    f"'{name}' is not known to belong to a layer of {self.model_type}: what it reads is unknown; "
                    "convert this model without a transform"
                )

    def ends(self) -> None:
        """Embeddings, the last norm, the head."""
        self.embeddings += [name for name in self.tensors if _EMBEDDINGS.fullmatch(name)]
        self.seen.update(self.embeddings)
        final = next((n for n in self.tensors if _FINAL.fullmatch(n) and n.endswith("weight")), None)
        tokens = next((n for n in self.embeddings if not n.endswith("wpe.weight")), None)
        if final is None or tokens is None:
            return
        head = Matrix(_HEAD, (0, 0), quantized=False)
        if not self.tied and _HEAD in self.tensors:
            found = self.matrix(_HEAD)
            head = Matrix(_HEAD, found.shape, bias=found.bias, quantized=False)
        elif self.tied:
            head = Matrix(_HEAD, self.matrix(tokens).shape, quantized=False)
        self.add(Edge("head", "final", self.norm("", final.removesuffix(".weight")), (head,), self.hidden))

    def add(self, edge: Edge) -> None:
        """CheckpointError where the two sides have different sizes."""
        producer = edge.producer
        size = self.tensors[producer.weight][1] if isinstance(producer, Norm) else (producer.shape[0],)
        wrong = next((c for c in edge.consumers if c.shape[1] != edge.channels * edge.repeat), None)
        if size != (edge.channels,) or (wrong is not None and edge.kind != "final"):
            raise CheckpointError(
                f"'{edge.id}' does not fit together: {list(size)} channels, and "
                f"{[list(c.shape) for c in edge.consumers][:4]} read them; check config.json and the files"
            )
        self.edges.append(edge)

    def result(self) -> Structure:
        """The structure of the model."""
        others = tuple(name for name in self.tensors if name not in self.seen)
        return Structure(
            self.norms,
            self.model_type,
            self.hidden,
            tuple(self.edges),
            tuple(self.writers),
            tuple(self.embeddings),
            tuple(self.output_norms),
            self.tied,
            others,
        )
