"""Finds the edges of a model from the names and shapes of its tensors.

A tensor of a layer that is not understood could read the same channels, so it is an error, never ignored. Knows names
and shapes.
"""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.models.families import Norms, fixed_of, language_config, mtp_layer, norms_of, outside_language_model
from ptqpipe.models.folding.structure import Edge, Matrix, Norm, Shapes, Structure

# Layers that transformers saves as blocks are those of Kimi K2.5.
_LAYER = re.compile(r"(?P<layer>(?:.*\.)?(?:layers|model\.blocks|h)\.\d+)\.(?P<leaf>.+)")
_EMBEDDINGS = re.compile(r"(?:.*\.)?(embed_tokens|wte|wpe)\.weight")
_HEAD = "lm_head.weight"
_FINAL = re.compile(r"(?:.*\.)?(norm|ln_f|final_layernorm|embedding_norm)\.(weight|bias)")
# Tensors of a layer that read no channel of an edge: norms of queries and keys, constants.
_HARMLESS = re.compile(
    r"(self_attn\.((indexer\.)?(q|k|query|key)_?(layer)?norm\.(weight|bias)|sinks)|.*rotary_emb\.inv_freq|attn\.(masked_)?bias"
    r"|.*\.(e_score_correction_bias|expert_bias|moe_statics\..*)|linear_attn\.(conv1d\.(weight|bias)|A_log|dt_bias|norm\.weight)"
    r"|conv\.conv\.(weight|bias)|mlp\.act_fn\.\w+"
    # Gemma 4 adds its small projections of the residual stream behind a norm of their own.
    r"|layer_scalar|per_layer_(input_gate|projection)\.weight|post_per_layer_input_norm\.weight)"
)
_ATTENTION = "self_attn"
_FUSED_QKV = (f"{_ATTENTION}.qkv_proj.weight", f"{_ATTENTION}.query_key_value.weight")
_OUTPUTS = tuple(f"{_ATTENTION}.{name}.weight" for name in ("o_proj", "dense", "out_proj", "to_out"))
_INDEX_INPUT = re.compile(rf"{_ATTENTION}\.indexer\.(wk|weights_proj)\.weight")
_INDEX_QUERIES = f"{_ATTENTION}.indexer.wq_b.weight"
_STATE_INPUT = re.compile(r"(linear_attn|conv)\.in_proj\w*\.weight")
_STATE_OUTPUT = re.compile(r"(linear_attn|conv)\.out_proj\.weight")
_MLPS = ("mlp", "feed_forward", "mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp", "shared_mlp")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_FUSED = (("gate_up_proj", "down_proj"), ("input_linear", "output_linear"))
_PLAIN = (("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h"))
_ROUTER = re.compile(
    r"(mlp|block_sparse_moe|feed_forward)\.(gate|router|shared_expert_gate|shared_experts_gate|gate\.wg|router\.(gate|layer))\.weight"
)
_EXPERT = re.compile(r"(?P<moe>mlp|block_sparse_moe|feed_forward)\.experts\.(?P<e>\d+)\.(?P<part>\w+)\.weight")
_EXPERT_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_STACKS = (
    ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ("mlp.experts.fc1", "mlp.experts.fc2"),
    ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
)


def find_structure(tensors: Shapes, config: Mapping[str, Any]) -> Structure:
    """The edges of a plain checkpoint; of a model of images and text those of its language model. UsageError for a
    family whose norms the table does not have, CheckpointError for one whose tensors are not the ones that its name
    promises."""
    norms, text = norms_of(config), language_config(config)
    model_type = str(text.get("model_type"))
    if norms is None:
        fixed = fixed_of(config)
        if fixed:
            raise UsageError(f"factors may not move in {model_type}: {fixed}; convert it without a transform")
        raise UsageError(
            f"where factors may move is not known for the architecture {model_type!r}; docs/models.md lists those for "
            "which it is; convert this model without a transform"
        )
    clipped = next((key for key in ("clip_qkv", "swiglu_limit") if text.get(key) is not None), None)
    if clipped is not None:
        raise UsageError(
            f"the model clips activations ({clipped} in config.json), which does not let factors pass; convert it "
            "without a transform"
        )
    outside, mtp = outside_language_model(config, tensors), mtp_layer(config)
    language = tuple(name for name in tensors if name not in outside and not (mtp and name.startswith(mtp)))
    finder = _Finder(tensors, text, norms, model_type, language)
    layers: dict[str, dict[str, str]] = {}
    for name in language:
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
    """Collects edges; every tensor that it understands is struck off ``seen``. ``language``: names of the tensors that
    text passes."""

    tensors: Shapes
    config: Mapping[str, Any]
    norms: Norms
    model_type: str
    language: tuple[str, ...]
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
        """Whether the head is the embedding: where the config says so, no file holds another, or readers know none."""
        return bool(self.config.get("tie_word_embeddings")) or self.head not in self.tensors or self.norms.tied

    @property
    def head(self) -> str:
        return next((name for name in self.language if name.endswith(f".{_HEAD}")), _HEAD)

    def number(self, key: str) -> int:
        """A count from the config, 0 where it is absent."""
        value = self.config.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    def check_has(self, layer: str, there: Container[str], *names: str) -> None:
        """CheckpointError for the first of these names, those of a layer without it, that is not there."""
        missing = next((name for name in names if name not in there), None)
        if missing is not None:
            whole = f"{layer}.{missing}" if layer else missing
            raise CheckpointError(f"a {self.model_type} has '{whole}', but the checkpoint does not; check the files")

    def matrix(
        self, name: str, *, group: str = "", rows: tuple[int, int] | None = None, transposed: bool = False
    ) -> Matrix:
        """A 2-D weight, or its rows [start, stop)."""
        shape = self.tensors[name][1]
        if len(shape) != 2:
            raise CheckpointError(
                f"'{name}' has the shape {list(shape)}, expected a matrix; convert this model without a transform"
            )
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
        self.check_has("", self.tensors, name)
        self.seen.add(name)
        has_bias = bias in self.tensors
        self.seen.update([bias] if has_bias else [])
        return Norm(name, self.norms.offset, bias if has_bias else None)

    def layer(self, layer: str, leaves: Mapping[str, str]) -> None:
        """The edges of a Llama-like layer: attention or what stands in its place, and an MLP or experts."""
        attention, inside = self.attention(layer, leaves)
        mlp, ups = self.mlp(layer, leaves)
        side_by_side = self.norms.attention == self.norms.mlp
        self.read(layer, "qkv", self.norms.attention, [*attention, *mlp] if side_by_side else attention)
        for edge in inside:
            self.add(edge)
        if not side_by_side:
            self.read(layer, "gate_up", self.norms.mlp, mlp)
        for edge in ups:
            self.add(edge)
        for name in self.norms.outputs:
            self.output_norms.append(self.norm(layer, name).weight)
        self.reject_unknown(layer, leaves)

    def read(self, layer: str, edge: str, norm: str, readers: Sequence[Matrix]) -> None:
        """The edge from a norm of a layer, "" for none, to what reads it."""
        if norm:
            self.add(Edge(f"{layer}.{edge}", "norm", self.norm(layer, norm), tuple(readers), readers[0].shape[1]))

    def attention(self, layer: str, leaves: Mapping[str, str]) -> tuple[list[Matrix], list[Edge]]:
        """The matrices that read the layer's input, and the edges between them and the layer's output."""
        linear = [name for leaf, name in leaves.items() if _STATE_INPUT.fullmatch(leaf)]
        if linear:  # a layer with states: nothing is known of the channels between its projections
            state = next((leaf for leaf in leaves if _STATE_OUTPUT.fullmatch(leaf)), "linear_attn.out_proj.weight")
            self.check_has(layer, leaves, state)
            self.writers.append(self.matrix(leaves[state]))
            return [self.matrix(name) for name in linear], []
        output = next((leaf for leaf in _OUTPUTS if leaf in leaves), f"{_ATTENTION}.o_proj.weight")
        if f"{_ATTENTION}.kv_b_proj.weight" in leaves:
            return self.latent_attention(layer, leaves, output)
        fused = next((leaves[leaf] for leaf in _FUSED_QKV if leaf in leaves), None)
        spelled = "to_{}" if f"{_ATTENTION}.to_q.weight" in leaves else "{}_proj"
        parts = [f"{_ATTENTION}.{spelled.format(part)}.weight" for part in "qkv"]
        needed = () if fused else parts if self.norms.values else parts[:1]
        self.check_has(layer, leaves, *needed, output)
        o = self.matrix(leaves[output])
        self.writers.append(o)
        if not self.norms.values:
            return [self.matrix(n) for n in ((fused,) if fused else (leaves[p] for p in parts if p in leaves))], []
        if fused is None:
            q, k, v = (self.matrix(leaves[leaf], group="qkv") for leaf in parts)
            gated = q.shape[0] > o.shape[1]  # q_proj has the gates of attention's outputs, too
            return [q, k, v], [replace(self.value_edge(f"{layer}.value", v, o), gated=gated)]
        qkv = self.matrix(fused)
        values = (qkv.shape[0] - o.shape[1]) // 2
        v = self.matrix(fused, rows=(qkv.shape[0] - values, qkv.shape[0]))
        return [qkv], [self.value_edge(f"{layer}.value", v, o)]

    def latent_attention(self, layer: str, leaves: Mapping[str, str], output: str) -> tuple[list[Matrix], list[Edge]]:
        """DeepSeek's latent attention: norms of the latent queries and of the latent keys and values are edges; values
        are not, since their rows lie between those of keys."""
        readers, edges = [], []
        for latent in ("q", "kv"):
            name = next((n for leaf, n in leaves.items() if leaf.startswith(f"{_ATTENTION}.{latent}_a_proj")), None)
            if name is None:  # queries may come in one step
                self.check_has(layer, leaves, f"{_ATTENTION}.q_proj.weight")
                readers.append(self.matrix(leaves[f"{_ATTENTION}.q_proj.weight"]))
                continue
            readers.append(self.matrix(name))
            self.check_has(layer, leaves, f"{_ATTENTION}.{latent}_b_proj.weight")
            behind = [f"{_ATTENTION}.{latent}_b_proj.weight", *([_INDEX_QUERIES] if latent == "q" else [])]
            matrices = tuple(self.matrix(leaves[leaf]) for leaf in behind if leaf in leaves)
            norm = self.norm(layer, f"{_ATTENTION}.{latent}_a_layernorm")
            edges.append(Edge(f"{layer}.{latent}_latent", "latent", norm, matrices, matrices[0].shape[1]))
        readers += [self.matrix(name) for leaf, name in leaves.items() if _INDEX_INPUT.fullmatch(leaf)]
        self.check_has(layer, leaves, output)
        self.writers.append(self.matrix(leaves[output]))
        return readers, edges

    def value_edge(self, edge: str, v: Matrix, o: Matrix) -> Edge:
        """v -> o with the grouping of heads. CheckpointError where the shapes do not group."""
        heads = self.number("num_attention_heads") or self.number("n_head")
        head_dim = o.shape[1] // heads if heads and o.shape[1] % heads == 0 else 0
        groups = v.shape[0] // head_dim if head_dim else 0
        if not groups or v.shape[0] % head_dim or heads % groups:
            raise CheckpointError(
                f"'{v.tensor}' has {v.shape[0]} values and '{o.tensor}' reads {o.shape[1]}, which {heads} attention "
                "heads cannot group; check config.json"
            )
        return Edge(edge, "value", v, (o,), v.shape[0], repeat=o.shape[1] // v.shape[0], head_dim=head_dim)

    def mlp(self, layer: str, leaves: Mapping[str, str]) -> tuple[list[Matrix], list[Edge]]:
        """What reads the input of the MLP or the experts, and up -> down of each that has a gate: then nothing but a
        product is between."""
        readers: list[Matrix] = []
        gated: list[tuple[str, Matrix, Matrix]] = []
        for prefix in _MLPS:
            weights = {leaf.removeprefix(f"{prefix}.").removesuffix(".weight"): name for leaf, name in leaves.items()}
            for names in _GATED:
                if all(name in weights for name in names):
                    gate, up = (self.matrix(weights[name], group=prefix) for name in names[:2])
                    readers += [gate, up]
                    gated.append((prefix, up, self.matrix(weights[names[2]])))
            for name, down_name in _FUSED:
                if name in weights and down_name in weights:
                    both, down = self.matrix(weights[name]), self.matrix(weights[down_name])
                    readers.append(both)
                    gated.append((prefix, self.matrix(both.tensor, rows=(both.shape[0] // 2, both.shape[0])), down))
            for up_name, down_name in _PLAIN:
                if up_name in weights and down_name in weights and "gate_proj" not in weights:
                    readers.append(self.matrix(weights[up_name]))
                    self.writers.append(self.matrix(weights[down_name]))
        for leaf, name in leaves.items():
            if _ROUTER.fullmatch(leaf):
                router = self.matrix(name)
                readers.append(Matrix(router.tensor, router.shape, bias=router.bias, quantized=False))
        for e, parts in self.experts(leaves).items():
            readers += [parts["gate"], parts["up"]]
            gated.append((f"experts.{e}", parts["up"], parts["down"]))
        for e, fused, up, down in self.stacks(leaves):
            readers.append(fused)
            gated.append((f"experts.{e}", up, down))
        if not readers:
            raise CheckpointError(f"'{layer}' has no gate_proj, up_proj and down_proj; check the files")
        self.writers += [down for _, _, down in gated]
        return readers, [Edge(f"{layer}.{name}.up", "up", up, (down,), up.shape[0]) for name, up, down in gated]

    def experts(self, leaves: Mapping[str, str]) -> dict[int, dict[str, Matrix]]:
        """Experts with weights of their own, by number."""
        experts: dict[int, dict[str, Matrix]] = {}
        for leaf, name in leaves.items():
            match = _EXPERT.fullmatch(leaf)
            part = _EXPERT_PARTS.get(match["part"]) if match else None
            if match is not None and part is not None:
                experts.setdefault(int(match["e"]), {})[part] = self.matrix(name, group=f"experts.{match['e']}")
        for e, parts in experts.items():
            if len(parts) != 3:
                raise CheckpointError(f"expert {e} has {sorted(parts)}, expected gate, up and down; check the files")
        return dict(sorted(experts.items()))

    def stacks(self, leaves: Mapping[str, str]) -> Iterable[tuple[int, Matrix, Matrix, Matrix]]:
        """Experts in 3-D stacks: (number, gate_up, its up half, down)."""
        for pair in _STACKS:
            names = [next((leaves[x] for x in (leaf, f"{leaf}.weight") if x in leaves), None) for leaf in pair]
            if names[0] is not None and names[1] is not None:
                yield from self.stack(names[0], names[1])

    def stack(self, gate_up: str, down: str) -> Iterable[tuple[int, Matrix, Matrix, Matrix]]:
        """Those of the tensors [experts, 2 x inner, hidden], the gates first, and [experts, hidden, inner]; where both
        hold [in, out], transposed."""
        first, second = self.tensors[gate_up][1], self.tensors[down][1]
        transposed = len(first) == 3 and len(second) == 3 and first[2] == 2 * second[1] and first[1] == second[2]
        if transposed:
            first, second = (first[0], first[2], first[1]), (second[0], second[2], second[1])
        if len(first) != 3 or len(second) != 3 or first[1] != 2 * second[2] or first[2] != second[1]:
            raise UsageError(
                f"'{gate_up}' {list(first)} beside {list(second)} is not a stack [experts, 2 x inner, hidden]; "
                "convert this model without a transform"
            )
        self.seen.update([gate_up, down])
        base = gate_up.removesuffix(".weight").rpartition(".")[0]
        experts = base if base.endswith("experts") else f"{base}.experts"

        def names_of(tensor: str, e: int, *parts: str) -> tuple[str, ...]:
            own = (f"{tensor}[{e}]", f"{tensor.removesuffix('.weight')}[{e}]")
            return (*dict.fromkeys(own), *(f"{experts}.{e}.{part}_proj" for part in parts))

        for e in range(first[0]):
            both = Matrix(
                gate_up, first[1:], expert=e, transposed=transposed, modules=names_of(gate_up, e, "gate", "up"),
                group=f"experts.{e}",
            )  # fmt: skip
            up = Matrix(gate_up, (second[2], first[2]), start=second[2], expert=e, transposed=transposed)
            modules = names_of(down, e, "down")
            yield e, both, up, Matrix(down, second[1:], expert=e, transposed=transposed, modules=modules)

    def gpt2_layer(self, layer: str, leaves: Mapping[str, str]) -> None:
        """The edges of a GPT-2 layer: weights are [in, out], q, k and v are one matrix, and the MLP is not gated."""
        need = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
        self.check_has(layer, leaves, *need)
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
        self.embeddings += [name for name in self.language if _EMBEDDINGS.fullmatch(name)]
        self.seen.update(self.embeddings)
        outside = (n for n in self.language if not _LAYER.fullmatch(n))
        final = next((n for n in outside if _FINAL.fullmatch(n) and n.endswith("weight")), None)
        tokens = next((n for n in self.embeddings if not n.endswith("wpe.weight")), None)
        if final is None or tokens is None:
            return
        matrix = self.matrix(tokens if self.tied else self.head)
        head = Matrix(_HEAD if self.tied else self.head, matrix.shape, bias=matrix.bias, quantized=False)
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
