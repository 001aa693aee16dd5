"""Names, shapes and seeded values of the model's weights.

Every matrix is stored [out, in] in bfloat16 and there is no bias: 395 tensors, 9 477 203 968 parameters for the
released sizes. A seeded weight is drawn from a stream of its own, named by the seed and the tensor's
name in the checkpoint, so it has the same bits on every device and whatever was made before it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import SPARSE, SalaConfig
from .random import normal, stream_key

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_EMBEDDED = 1.2
"""Standard deviation of the scaled embedding."""
_NORM_SPREAD = 0.1
"""Norm weights are 1 ± this, so that a norm weight left out shows."""
_SHARPNESS = 2.0
"""Gain of q, k and v in sparse layers: with scores of deviation 4 the attention settles on few keys of thousands,
so that its output does not average to nothing and a block chosen wrongly shows."""
_LOGIT_SPREAD = 2.0
"""Standard deviation of the logits."""


def layer_name(layer: int, tensor: str) -> str:
    """Checkpoint name of a layer's tensor: `layer_name(3, "mlp.up_proj")` is `model.layers.3.mlp.up_proj.weight`."""
    return f"model.layers.{layer}.{tensor}.weight"


def tensor_shapes(config: SalaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the checkpoint, by its name there; nothing is allocated."""
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer, mixer in enumerate(config.mixer_types):
        heads = (config.num_attention_heads if mixer == SPARSE else config.lightning_heads) * d
        keys = config.num_key_value_heads * d if mixer == SPARSE else heads
        tensors: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, heads),
        }
        if mixer == SPARSE:
            tensors |= {"self_attn.o_gate": (heads, hidden)}
        else:
            tensors |= {"self_attn.z_proj": (heads, hidden), "self_attn.q_norm": (d,), "self_attn.k_norm": (d,)}
            tensors |= {"self_attn.o_norm": (heads,)}
        tensors |= {
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {layer_name(layer, name): shape for name, shape in tensors.items()}
    return shapes | {FINAL_NORM: (hidden,), HEAD: (config.vocab_size, hidden)}


def parameter_count(config: SalaConfig) -> int:
    """Number of parameters."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def seeded_tensor(config: SalaConfig, seed: int, name: str, device: torch.device | str = "cpu") -> Tensor:
    """One weight, bfloat16, by its checkpoint name; KeyError if the model has no such tensor.

    Every projection keeps a unit input at unit size (deviation 1/√inputs), so each of the residual branches adds
    about as much as the next and none fades or grows through 32 layers.
    """
    shape = tensor_shapes(config)[name]
    scale, offset = _distribution(config, name, shape)
    return normal(stream_key("weight", seed, name), shape, scale=scale, offset=offset, device=device)


def seeded_weights(config: SalaConfig, seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """All weights by checkpoint name, bfloat16 on `device` (18.95 GB for the released sizes)."""
    return {name: seeded_tensor(config, seed, name, device) for name in tensor_shapes(config)}


def _distribution(config: SalaConfig, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Standard deviation and mean of a tensor's values."""
    if len(shape) == 1:
        return _NORM_SPREAD, 1.0
    if name == EMBEDDING:
        return _EMBEDDED / config.scale_emb, 0.0
    if name == HEAD:
        return _LOGIT_SPREAD * config.logit_divisor / math.sqrt(config.hidden_size), 0.0
    gain = 1.0
    if name.startswith("model.layers.") and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        layer = int(name.split(".")[2])
        gain = _SHARPNESS if config.mixer_types[layer] == SPARSE else 1.0
    return gain / math.sqrt(shape[1]), 0.0
