"""A language model that keeps every distance within those it was trained on, by an attention map.

The weights, the frequencies and all layers are those of the stock model. What differs is where a query at
position m and a key at position n are said to stand when their score is computed: the pairs fall into bands,
and in each band both are turned at places of its own. Keys are cached before they are turned. config.json
names the map under `attention_map`: its name, its parameters, and the window L that the model was trained on.

Needs torch and transformers (5.4 or newer, before 6). Written by ropepatch, which need not be installed.

Shapes: B sequences, H heads of queries, K of keys and values, Q queries, T keys, D dimensions of a head.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers import conversion_mapping as names
from transformers.masking_utils import sdpa_mask

MODEL_TYPE = "llama-attention-map"  # not `llama`: what does not run this file must not read the weights
ROTARY = "model.rotary_emb"  # where the stock model turns queries and keys
NAME = __name__  # of this file's attention, in the registry of the process
SCORES = {"cpu": 1 << 22, "cuda": 1 << 25}  # that are written down at a time, by the kind of device

Place = Callable[[Tensor], Tensor]  # of positions


class Band(NamedTuple):
    """The keys from `begin` to before `end`, seen as if they stood at `key` and the query at `query`."""

    begin: Place
    end: Place
    query: Place
    key: Place


def same(positions: Tensor) -> Tensor:
    """The position itself."""
    return positions


def constant(place: int) -> Place:
    """One place for all positions."""
    return lambda positions: torch.full_like(positions, place)


def nearer(distance: int) -> Place:
    """The first position that is nearer to a query than a distance; for 0, the one after the query."""
    return lambda m: m - distance + 1


PLAIN = (Band(constant(0), nearer(0), same, same),)


def near(window: int) -> Band:
    """Distances below a window, as they are."""
    return Band(nearer(window), nearer(0), same, same)


def far(window: int, query: Place, key: Place) -> Band:
    """Distances from a window on."""
    return Band(constant(0), nearer(window), query, key)


def rerope(window: int) -> tuple[Band, ...]:
    """min(D, W)."""
    return near(window), far(window, constant(window), constant(0))


def leaky_rerope(window: int, divisor: float) -> tuple[Band, ...]:
    """D below W, then W + (D - W) / k."""
    shift = window - window / divisor
    return near(window), far(window, lambda m: shift + m.double() / divisor, lambda n: n.double() / divisor)


def self_extend(window: int, group: int) -> tuple[Band, ...]:
    """D below W, then m // G - n // G + W - W // G."""
    shift = window - window // group
    return near(window), far(window, lambda m: m // group + shift, lambda n: n // group)


def dual_chunk(clip: int, chunk: int) -> tuple[Band, ...]:
    """Within a chunk of s D; one chunk back min(m % s + s, c) - n % s; farther min(2s - 1, c) - n % s."""
    own = partial(torch.remainder, other=chunk)

    def clipped(m: Tensor) -> Tensor:
        return (own(m) + chunk).clamp(max=clip)

    return (
        Band(lambda m: m - own(m), nearer(0), own, own),
        Band(lambda m: m - own(m) - chunk, lambda m: m - own(m), clipped, own),
        Band(constant(0), lambda m: m - own(m) - chunk, constant(min(2 * chunk - 1, clip)), own),
    )


def lampe(length: int, mapped: int, head: int, tail: int) -> tuple[Band, ...]:
    """D up to h, then u(m) - u(n) + b1 with u(p) = M p // (N - 1), and D - b2 at the far end."""

    def read(position: Any) -> Any:
        return mapped * position // max(1, length - 1)

    while tail + 1 < length and read(tail) == read(tail + 1):
        tail += 1
    closer = head - (read(head) + 1)
    farther = length - 1 - tail - read(length - 1 - tail) - closer
    middle, last = nearer(head + 1), nearer(max(length - tail, head + 1))
    return (
        Band(middle, nearer(0), same, same),
        Band(last, middle, lambda m: read(m) + closer, read),
        Band(constant(0), last, lambda m: m - farther, same),
    )


def lambda_shape(window: int, sinks: int) -> tuple[Band, ...]:
    """D below W; the first k tokens at W; no others."""
    end = nearer(window)
    return near(window), Band(constant(0), lambda m: end(m).clamp(max=sinks), constant(window), constant(0))


def string(shift: int, window: int) -> tuple[Band, ...]:
    """D below S, then D - S + W."""
    return near(shift), far(shift, lambda m: m + window - shift, same)


MAPS: dict[str, Callable[..., tuple[Band, ...]]] = {
    "rerope": rerope,
    "leaky-rerope": leaky_rerope,
    "self-extend": self_extend,
    "dca": dual_chunk,
    "lampe": lampe,
    "lambda": lambda_shape,
    "string": string,
}


def tell(batch_size: int, q_length: int, kv_length: int, **asked: Any) -> Tensor | None:
    """In the place of a mask of Q * T: T + 2 whole numbers for each sequence, as [B, 1, 1, T + 2].

    Which keys are tokens, the column of the first query, and how many keys it sees at most, or 0. Documents
    of a packed row and a user's own functions are a mask.
    """
    plain = asked.get("allow_is_causal_skip", True) or q_length == 1
    if q_length != kv_length and not plain:  # a static cache, before transformers 5.14
        columns = torch.arange(kv_length - 1, device=asked.get("device", "cpu"))[None]
        rows = torch.arange(batch_size, device=columns.device)[:, None]
        plain = not asked["mask_function"](rows, 0, columns, columns + 1).any()
    if asked.get("use_vmap") or not plain:
        return sdpa_mask(batch_size, q_length, kv_length, **asked | {"allow_is_causal_skip": False})
    told = torch.ones(batch_size, kv_length + 2, dtype=torch.long, device=asked.get("device", "cpu"))
    first = asked.get("kv_offset", 0)
    if (mask := asked.get("attention_mask")) is not None:
        given = mask[:, first : first + kv_length]
        told[:, :kv_length] = 0
        told[:, : given.shape[1]] = given
    told[:, kv_length] = asked.get("q_offset", 0) - first
    told[:, kv_length + 1] = asked.get("local_size") or 0
    return told[:, None, None]


class Sight:
    """What the queries of a step may see, and at which positions [B or 1, Q] and [B or 1, T] all stand.

    Cached tokens follow each other; padding stands nowhere.
    """

    def __init__(self, mask: Tensor | None, count: int, keys: int, position_ids: Tensor) -> None:
        """From what `tell` said, or a mask [B, 1, Q, T], for `count` queries."""
        self.queries = self.keys = position_ids
        self.given = mask if mask is not None and mask.dtype != torch.long else None
        self.tokens, self.column, self.window = None, keys - count, 0
        if mask is not None and self.given is None:
            self.tokens = mask[:, 0, 0, :keys].bool()
            self.column, self.window = mask[0, 0, 0, keys:].tolist()
        if count == keys:
            return
        if self.tokens is None:
            raise ValueError("a mask of four dimensions is read without a cache only")
        own = self.tokens[:, self.column : self.column + count]
        rows = torch.arange(count, device=own.device)
        anchor = torch.where(own, rows, 0).amax(-1, keepdim=True)  # the last query that is a token
        passed = self.tokens.long().cumsum(-1)
        behind = passed.gather(1, self.column + anchor) - passed
        self.keys = position_ids.expand(len(anchor), -1).gather(1, anchor) - behind

    def mask(self, rows: slice) -> Tensor:
        """Whether the queries of some rows see the keys, [B or 1, q, T]; or what is added to scores."""
        if self.given is not None:
            return self.given[:, 0, rows]
        keys = torch.arange(self.keys.shape[-1], device=self.keys.device)
        own = self.column + torch.arange(self.queries.shape[-1], device=keys.device)[rows, None]
        seen = keys <= own
        if self.window:
            seen &= keys > own - self.window
        return seen[None] if self.tokens is None else seen & self.tokens[:, None]


class Unrotated(nn.Module):
    """Stands in the place of the rotary module: queries and keys stay as they are until attention turns them.

    Args:
        stock: The rotary module; a submodule, which transformers initialises.
        config: The model's.
    """

    def __init__(self, stock: nn.Module, config: Any) -> None:
        super().__init__()
        self.stock, self.config = stock, config
        described = config.attention_map
        parameters = dict(described["parameters"])
        self.window: int = described["window"]
        self.log_n: bool = parameters.pop("log_n")
        self.factor: float = parameters.pop("attention_factor") ** 2
        self.layer_type = [described["layer_type"]] if described.get("layer_type") else []
        self.bands = partial(MAPS[described["name"]], **parameters)  # called when read: places do not pickle

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: str) -> tuple[Tensor, Tensor]:
        """Ones and zeros, but to layers of a type that is not mapped the stock module's cos and sin."""
        if self.config._attn_implementation != NAME:
            raise ValueError(
                f"this model has an attention map, which {self.config._attn_implementation!r} would ignore"
            )
        cos, sin = self.stock(x, position_ids, *layer_type)
        if list(layer_type) != self.layer_type:
            return cos, sin
        return torch.ones_like(cos), torch.zeros_like(sin)

    def turned(self, module: nn.Module, x: Tensor, places: Tensor) -> Tensor:
        """Queries or keys [B, H, T, D] at places [B or 1, T], turned by the stock model's own function."""
        cos, sin = (table.to(x.device) for table in self.stock(x, places, *self.layer_type))
        width = cos.shape[-1]
        apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
        out, _ = apply(x[..., :width], x[:, :0, :, :width], cos, sin)
        return out if width == x.shape[-1] else torch.cat((out, x[..., width:]), -1)

    def temperature(self, m: Tensor) -> Tensor:
        """What the scores of queries [B or 1, Q] at m are multiplied by, [B or 1, 1, Q, 1]."""
        late = (m.double() + 1).clamp(min=1).log() / math.log(self.window)
        factor = self.factor * (late.clamp(min=1) if self.log_n else torch.ones_like(late))
        return factor.float()[:, None, :, None]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """What unturned queries [B, H, Q, D] read of unturned keys and values [B, K, T, D]: [B, Q, H, D].

    A block of queries at a time: the memory grows with the length, not with its square, in training too.
    """
    rope: Unrotated | None = module.__dict__["attention_map"]  # None where this layer is not mapped
    (batch, heads, count, _), keys = query.shape, key.shape[2]
    sight = Sight(attention_mask, count, keys, position_ids)
    far_seeing = None if rope is None or 0 < sight.window <= rope.window else rope
    bands = PLAIN if far_seeing is None else far_seeing.bands()
    spans = [span(band, sight.queries, sight.keys) for band in bands]
    turned = [key[:, :, columns] for columns in spans]
    if rope is not None:
        places = [band.key(sight.keys[:, at]) for band, at in zip(bands, spans, strict=True)]
        turned = [rope.turned(module, k, at) for k, at in zip(turned, places, strict=True)]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    wide = torch.promote_types(query.dtype, torch.float32)

    def read(own: Tensor, rows: slice) -> Tensor:
        m, seen = sight.queries[:, rows], sight.mask(rows)
        at = [span(band, m, sight.keys) for band in bands]
        end = max(columns.stop for columns in at)
        scores = torch.full(
            (batch, heads, own.shape[2], end), torch.finfo(wide).min, dtype=wide, device=own.device
        )
        with torch.autocast(own.device.type, enabled=False):
            for band, k, whole, columns in zip(bands, turned, spans, at, strict=True):
                n = sight.keys[:, None, columns]
                holds = (n >= band.begin(m)[..., None]) & (n < band.end(m)[..., None])
                if seen.dtype == torch.bool:
                    holds = holds & seen[..., columns]
                q = own if rope is None else rope.turned(module, own, band.query(m))
                factor = scale if far_seeing is None else scale * far_seeing.temperature(m)
                q = (q.to(wide) * factor).to(value.dtype)
                # Heads that share a key are rows beside each other.
                q = q.reshape(batch, key.shape[1], -1, q.shape[-1])
                k = k[:, :, columns.start - whole.start : columns.stop - whole.start].to(value.dtype)
                score = (q @ k.mT).to(wide).reshape(batch, heads, own.shape[2], -1)
                scores[..., columns] = torch.where(holds[:, None], score, scores[..., columns])
            if seen.dtype != torch.bool:
                scores = scores + seen[:, None, :, :end].to(wide)
            weights = nn.functional.dropout(scores.softmax(-1), dropout).to(value.dtype)
            out = weights.reshape(batch, key.shape[1], -1, end) @ value[:, :, :end]
        return out.reshape(batch, heads, own.shape[2], -1)

    size = max(1, SCORES.get(query.device.type, SCORES["cpu"]) // (batch * heads * keys))
    blocks = [slice(row, min(row + size, count)) for row in range(0, count, size)]
    kept = not torch.is_grad_enabled() or len(blocks) == 1  # else each is computed again in the backward pass
    run: Any = read if kept else partial(checkpoint, read, use_reentrant=False)
    output = torch.cat([run(query[:, :, rows], rows) for rows in blocks], 2)
    return output.transpose(1, 2).contiguous(), None


def span(band: Band, m: Tensor, n: Tensor) -> slice:
    """The columns from the first to the last key at n that any query at m sees by a band."""
    held = ((n >= band.begin(m).amin(-1, keepdim=True)) & (n < band.end(m).amax(-1, keepdim=True))).any(0)
    columns = held.nonzero()[:, 0]
    return slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(0, 0)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, tell)


class MappedLlamaConfig(LlamaConfig):
    """The stock configuration, and the map."""

    model_type = MODEL_TYPE
    attention_map: dict[str, Any] | None = None


class MappedLlamaForCausalLM(LlamaForCausalLM):
    """The stock model, whose attention follows the map."""

    config_class = MappedLlamaConfig
    _supports_attention_backend = False  # another engine's attention would read unturned queries and keys
    _supports_flash_attn = _supports_flex_attn = _can_compile_fullgraph = False

    def __init__(self, config: MappedLlamaConfig) -> None:
        """The stock model with another module in the rotary one's place."""
        super().__init__(config)
        described: Any = config.attention_map
        rope = Unrotated(self.get_submodule(ROTARY), config)
        self.set_submodule(ROTARY, rope)
        layers = described["layers"]
        for module in self.modules():
            if isinstance(index := getattr(module, "layer_idx", None), int):
                module.__dict__["attention_map"] = rope if layers is None or index in layers else None
        config._attn_implementation = NAME


# What transformers renames as it reads the weights of the stock model it must rename here.
OWN_NAMES = {LlamaConfig.model_type: MODEL_TYPE, LlamaForCausalLM.__name__: MappedLlamaForCausalLM.__name__}
for stock_name, own_name in OWN_NAMES.items():
    if conversion := names.get_checkpoint_conversion_mapping(stock_name):
        names.register_checkpoint_conversion_mapping(own_name, conversion, overwrite=True)
