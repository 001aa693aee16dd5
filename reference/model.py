"""The whole model: embedding, layers, head, and one sequence's way through them.

A prompt may be fed in one piece, in pieces or token by token: the bits are the same. Sequences share nothing but
the weights, so a batch is a loop over sequences and none depends on its neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from .attention import attend_blocks, attend_dense, output_gate
from .cache import KeyCache, LightningCache, Sequence
from .config import SalaConfig
from .lightning import lightning_mixer
from .mlp import mlp
from .norms import residual_add, rms_norm
from .numerics import MODEL, Precision, bf16, f32, matmul, mul_bf16
from .sampling import sample
from .selection import select_blocks
from .weights import EMBEDDING, FINAL_NORM, HEAD, layer_name, tensor_shapes


@dataclasses.dataclass
class Trace:
    """What a forward pass leaves behind for whoever asks.

    `hidden`: the scaled embedding, then each layer's output, [t, hidden_size] each. `blocks`: by sparse layer, the
    chosen blocks [t, KV, chosen] ascending, −1 where unused and for tokens whose attention was dense.
    """

    hidden: list[Tensor] = dataclasses.field(default_factory=list)
    blocks: dict[int, Tensor] = dataclasses.field(default_factory=dict)


class Sala:
    """A MiniCPM-SALA model: a configuration, its weights by checkpoint name, and the precision to evaluate in.

    Weights are bfloat16 on any device. Widened to float64 beforehand they give the same bits, sooner: every product
    widens them anyway. `end_effect` reproduces the released prefill kernel, which for a prompt in one piece
    sees one compressed key fewer at some lengths; the law (off) gives the same answer in any pieces.
    """

    def __init__(
        self,
        config: SalaConfig,
        weights: Mapping[str, Tensor],
        precision: Precision = MODEL,
        *,
        end_effect: bool = False,
    ) -> None:
        """Check that every weight is there in its shape; ValueError names the first that is not."""
        for name, shape in tensor_shapes(config).items():
            if name not in weights:
                raise ValueError(f"{name}: missing; expected {list(shape)}")
            if weights[name].shape != shape:
                raise ValueError(f"{name}: shape {list(weights[name].shape)}; expected {list(shape)}")
        self.config = config
        self.weights = weights
        self.precision = precision
        self.end_effect = end_effect

    @property
    def device(self) -> torch.device:
        """Where the weights lie, and so the computation."""
        return self.weights[EMBEDDING].device

    def start(self, prompt_length: int) -> Sequence:
        """A new sequence whose whole prompt has `prompt_length` tokens."""
        return Sequence(self.config, prompt_length, self.precision, self.device)

    def forward(self, tokens: Tensor, sequence: Sequence, trace: Trace | None = None) -> Tensor:
        """Feed the next `tokens` [t] (integers) of a sequence; the last layer's output [t, hidden_size].

        Raises ValueError for a token outside the vocabulary, or a prompt in pieces under `end_effect`.
        """
        x = self.embed(tokens)
        if trace is not None:
            trace.hidden.append(x)
        for layer in range(self.config.num_hidden_layers):
            x = self.layer(layer, x, sequence, trace)
            if trace is not None:
                trace.hidden.append(x)
        sequence.length += len(tokens)
        return x

    def embed(self, tokens: Tensor) -> Tensor:
        """Scaled embedding of `tokens` [t], [t, hidden_size]."""
        tokens = tokens.to(self.device)
        if tokens.numel() == 0 or int(tokens.min()) < 0 or int(tokens.max()) >= self.config.vocab_size:
            raise ValueError(f"tokens must be at least one id from 0 to {self.config.vocab_size - 1}")
        return mul_bf16(self.weights[EMBEDDING][tokens.long()], self.config.scale_emb, self.precision)

    def layer(self, layer: int, x: Tensor, sequence: Sequence, trace: Trace | None = None) -> Tensor:
        """One layer's output [t, hidden_size] for its input `x` at the next t positions of the sequence.

        The layer's cache grows by t tokens; `sequence.length` is the caller's to advance, after the last layer.
        """
        normed = self._norm(x, layer_name(layer, "input_layernorm"))
        cache = sequence.layers[layer]
        if isinstance(cache, KeyCache):
            branch = self._sparse_mixer(layer, normed, sequence, cache, trace)
        else:
            branch = self._lightning_mixer(layer, normed, sequence, cache)
        x = residual_add(x, branch, self.config.residual_scale, self.precision)
        normed = self._norm(x, layer_name(layer, "post_attention_layernorm"))
        gate_up = torch.cat([self._weight(layer, "mlp.gate_proj"), self._weight(layer, "mlp.up_proj")])
        branch = mlp(normed, gate_up, self._weight(layer, "mlp.down_proj"), self.precision)
        return residual_add(x, branch, self.config.residual_scale, self.precision)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [t, vocab_size] of the last layer's output `x` [t, hidden_size]: bfloat16, float64 for the oracle."""
        normed = self._norm(x, FINAL_NORM)
        divisor = f32(torch.tensor(self.config.logit_divisor, dtype=torch.float64), self.precision).double()
        scaled = bf16(f32(normed.double() / divisor, self.precision), self.precision)
        return matmul(scaled, self.weights[HEAD], self.precision)

    def _weight(self, layer: int, tensor: str) -> Tensor:
        return self.weights[layer_name(layer, tensor)]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[name], self.config.rms_norm_eps, self.precision)

    def _project(self, layer: int, x: Tensor, tensor: str) -> Tensor:
        return matmul(x, self._weight(layer, f"self_attn.{tensor}"), self.precision)

    def _positions(self, sequence: Sequence, tokens: int) -> Tensor:
        return torch.arange(sequence.length, sequence.length + tokens, device=self.device)

    def _lightning_mixer(self, layer: int, x: Tensor, sequence: Sequence, cache: LightningCache) -> Tensor:
        """Lightning attention of the normed input `x` [t, hidden_size], projected back to [t, hidden_size]."""
        packed = torch.cat([self._project(layer, x, f"{part}_proj") for part in "qkvz"], dim=-1)
        q_norm, k_norm, o_norm = (self._weight(layer, f"self_attn.{part}_norm") for part in "qko")
        eps, theta = self.config.rms_norm_eps, self.config.rope_theta
        positions = self._positions(sequence, len(x))
        out, cache.state = lightning_mixer(
            packed, q_norm, k_norm, o_norm, positions, cache.state, self.precision, eps=eps, theta=theta
        )
        return self._project(layer, out, "o_proj")

    def _sparse_mixer(self, layer: int, x: Tensor, sequence: Sequence, cache: KeyCache, trace: Trace | None) -> Tensor:
        """Attention to all keys or to chosen blocks, gated and projected back to [t, hidden_size]; no positions."""
        dim = self.config.head_dim
        q, k, v = (self._project(layer, x, f"{part}_proj").unflatten(-1, (-1, dim)) for part in "qkv")
        cache.append(k, v)
        positions = self._positions(sequence, len(x))
        dense = self._dense_tokens(sequence, len(x))
        chosen = torch.full((len(x), k.shape[1], self.config.sparse.chosen), -1, dtype=torch.int32, device=x.device)
        parts = []
        if dense:
            keys = sequence.length + dense
            parts.append(
                attend_dense(q[:dense], cache.keys[:keys], cache.values[:keys], positions[:dense], self.precision)
            )
        if dense < len(x):
            rest, where = q[dense:], positions[dense:]
            chosen[dense:] = self._select(rest, where, sequence, cache)
            parts.append(attend_blocks(rest, cache.keys, cache.values, chosen[dense:], where, self.precision))
        if trace is not None:
            trace.blocks[layer] = chosen
        out = torch.cat(parts).flatten(-2)
        return self._project(layer, output_gate(out, self._project(layer, x, "o_gate"), self.precision), "o_proj")

    def _dense_tokens(self, sequence: Sequence, tokens: int) -> int:
        """How many of the next `tokens` attend densely: those with fewer than dense_len keys in total.

        A prompt's tokens all count the whole prompt; a token after it counts the keys up to itself.
        """
        dense_len = self.config.sparse.dense_len
        if sequence.prompt_length >= dense_len:
            return 0
        return min(max(dense_len - 1 - sequence.length, 0), tokens)

    def _select(self, q: Tensor, positions: Tensor, sequence: Sequence, cache: KeyCache) -> Tensor:
        """Blocks chosen for `q` [t, H, D] at `positions` [t]: int32 [t, KV, chosen]."""
        sparse = self.config.sparse
        end_effect = None
        if self.end_effect and sequence.length < sequence.prompt_length:
            if sequence.length or len(cache.keys) != sequence.prompt_length:
                raise ValueError("the end effect is the released kernel's, which takes the whole prompt in one piece")
            end_effect = sequence.prompt_length
        return select_blocks(
            q,
            *cache.compressed(),
            positions,
            len(cache.keys),
            topk_total=sparse.chosen,
            local_blocks=sparse.local_blocks,
            init_blocks=sparse.init_blocks,
            precision=self.precision,
            end_effect=end_effect,
        )


def generate(
    model: Sala,
    prompt: Items[int],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    piece: int | None = None,
    stop: Collection[int] | None = None,
) -> list[int]:
    """Continue `prompt` (token ids) by up to `new_tokens` tokens, and return these.

    `temperature` 0 is greedy, the lowest id at ties; `top_k` 0 and `top_p` 1 are off. The prompt is fed `piece` tokens
    at a time (None: in one piece), which changes nothing but memory. A token of `stop` (None: the
    configuration's ends of text) is returned and ends the text.
    """
    ends = frozenset(model.config.eos_tokens if stop is None else stop)
    sequence = model.start(len(prompt))
    tokens = torch.tensor(prompt, dtype=torch.int64, device=model.device)
    for part in tokens.split(piece or len(tokens)):
        x = model.forward(part, sequence)
    out: list[int] = []
    while len(out) < new_tokens:
        step = len(out)
        out.append(_draw(model, x[-1:], temperature, top_k, top_p, seed, step))
        if out[-1] in ends or len(out) == new_tokens:
            break
        x = model.forward(torch.tensor(out[-1:], device=model.device), sequence)
    return out


def _draw(model: Sala, x: Tensor, temperature: float, top_k: int, top_p: float, seed: int, step: int) -> int:
    """The next token after the last layer's output `x` [1, hidden_size]."""

    def row(value: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([value], dtype=dtype, device=x.device)

    token = sample(
        model.logits(x),
        row(temperature, torch.float32),
        row(top_k, torch.int32),
        row(top_p, torch.float32),
        row(seed, torch.int64),
        row(step, torch.int64),
        model.precision,
    )
    return int(token)
