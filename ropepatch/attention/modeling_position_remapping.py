"""A language model with a position remapping, which keeps every distance within the trained range.

Weights, inverse frequencies and layers are those of the stock model. Only the positions differ at which a
query at m and a key at n are rotated: pairs (m, n) fall into bands, and each band has its own positions. The
KV cache holds unrotated keys. `position_remapping` in config.json contains the name of the remapping, its
parameters, and the original context length L.

Needs torch and transformers (5.4 or newer, before 6). Written by ropepatch, which uses the same file and
need not be installed.

Letters: m is the position of a query, n that of a key, Δ = m - n their distance.
Shapes: B sequences, H heads of queries, K of keys and values, Q queries, T keys, D dimensions of a head;
q queries and t keys of a block.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers import conversion_mapping as names
from transformers.integrations import flex_attention as flex
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

MODEL_TYPE = "llama-position-remapping"  # not `llama`: code without this file must not load the weights
ROTARY = "model.rotary_emb"  # the rotary module of the stock model
NAME = __name__  # of this file's attention, in transformers' registry
POSITIONS_SLOT = "_ropepatch_positions"  # attribute of an attention module with its remapping, or None
SCORES = {"cpu": 1 << 22, "cuda": 1 << 27}  # computed at a time, by device type
KERNEL_BLOCK = 128  # queries or keys per block of FlexAttention
NARROWEST = 16  # least head dimension for FlexAttention
FAR = (1 << 31) - 1  # beyond any position
VARIANTS = 64  # of its kernel per process, by heads, gradients, batch; beyond, it would store all scores

# An elementwise function of positions, to integers or fractions
Place = Callable[[Tensor], Tensor]


class Band(NamedTuple):
    """The keys n with begin(m) <= n < end(m), rotated at key(n), and the query rotated at query(m)."""

    begin: Place
    end: Place
    query: Place
    key: Place

    def holds(self, m: Tensor, n: Tensor) -> Tensor:
        """Return the mask [..., Q, T] of queries at m [..., Q] and keys at n [..., T] in the band."""
        n = n[..., None, :]
        return (n >= self.begin(m)[..., None]) & (n < self.end(m)[..., None])

    def span(self, m: Tensor, n: Tensor) -> slice:
        """Return the columns from the first to the last key at n [B, T] in the band of any m [B, Q]."""
        first = self.begin(m).amin(-1, keepdim=True)
        last = self.end(m).amax(-1, keepdim=True)
        columns = ((n >= first) & (n < last)).any(0).nonzero()[:, 0]
        if len(columns) == 0:
            return slice(0, 0)
        return slice(int(columns[0]), int(columns[-1]) + 1)


def precise(numbers: Tensor) -> Tensor:
    """Return numbers in float64, or in float32 on Apple's GPUs, which lack float64."""
    return numbers.float() if numbers.device.type == "mps" else numbers.double()


def same(positions: Tensor) -> Tensor:
    """Return positions unchanged."""
    return positions


def constant(position: int) -> Place:
    """Return a function to one constant position."""
    return lambda positions: torch.full_like(positions, position)


def nearer(distance: int) -> Place:
    """Return a function to the first key position at less than a distance; for 0, the next position."""
    return lambda m: m - distance + 1


def near(window: int) -> Band:
    """Distances below a window, unchanged."""
    return Band(nearer(window), nearer(0), same, same)


def far(window: int, query: Place, key: Place) -> Band:
    """Distances from a window on."""
    return Band(constant(0), nearer(window), query, key)


def rerope(window: int) -> tuple[Band, ...]:
    """min(Δ, W)."""
    return near(window), far(window, constant(window), constant(0))


def leaky_rerope(window: int, divisor: float) -> tuple[Band, ...]:
    """Δ below W, then W + (Δ - W) / k."""
    shift = window - window / divisor
    return near(window), far(
        window, lambda m: shift + precise(m) / divisor, lambda n: precise(n) / divisor
    )


def self_extend(window: int, group: int) -> tuple[Band, ...]:
    """Δ below W, then m // G - n // G + W - W // G."""
    shift = window - window // group
    return near(window), far(window, lambda m: m // group + shift, lambda n: n // group)


def dual_chunk(clip: int, chunk: int) -> tuple[Band, ...]:
    """Within a chunk of s Δ; one chunk back min(m % s + s, c) - n % s; farther min(2s - 1, c) - n % s."""
    within = partial(torch.remainder, other=chunk)

    def clipped(m: Tensor) -> Tensor:
        return (within(m) + chunk).clamp(max=clip)

    return (
        Band(lambda m: m - within(m), nearer(0), within, within),
        Band(lambda m: m - within(m) - chunk, lambda m: m - within(m), clipped, within),
        Band(
            constant(0),
            lambda m: m - within(m) - chunk,
            constant(min(2 * chunk - 1, clip)),
            within,
        ),
    )


def lampe_ends(length: int, mapped: int, head: int, tail: int) -> tuple[int, int, int]:
    """R, b1 and b2: where the far end begins, and what is added and taken off."""
    last = max(1, length - 1)
    # Where M p // (N - 1) grows next
    step = -(-(mapped * tail // last + 1) * last // mapped)
    tail = min(step, length) - 1
    closer = head - (mapped * head // last + 1)
    return (
        tail,
        closer,
        length - 1 - tail - mapped * (length - 1 - tail) // last - closer,
    )


def lampe(length: int, mapped: int, head: int, tail: int) -> tuple[Band, ...]:
    """Δ up to h, then u(m) - u(n) + b1 with u(p) = M p // (N - 1), and Δ - b2 at the far end."""
    tail, closer, farther = lampe_ends(length, mapped, head, tail)
    middle, last = nearer(head + 1), nearer(max(length - tail, head + 1))

    def compressed(positions: Tensor) -> Tensor:
        return mapped * positions // max(1, length - 1)

    return (
        Band(middle, nearer(0), same, same),
        Band(last, middle, lambda m: compressed(m) + closer, compressed),
        Band(constant(0), last, lambda m: m - farther, same),
    )


def lambda_shape(window: int, sinks: int) -> tuple[Band, ...]:
    """Δ below W; the first k tokens at W; no others."""
    end = nearer(window)
    return near(window), Band(
        constant(0), lambda m: end(m).clamp(max=sinks), constant(window), constant(0)
    )


def string(shift: int, window: int) -> tuple[Band, ...]:
    """Δ below S, then Δ - S + W."""
    return near(shift), far(shift, lambda m: m + window - shift, same)


REMAPPINGS: dict[str, Callable[..., tuple[Band, ...]]] = {
    "rerope": rerope,
    "leaky-rerope": leaky_rerope,
    "self-extend": self_extend,
    "dca": dual_chunk,
    "lampe": lampe,
    "lambda": lambda_shape,
    "string": string,
}
EVERY = Band(constant(-FAR), constant(FAR), same, same)


def short_mask(
    batch_size: int, q_length: int, kv_length: int, **options: Any
) -> Tensor | None:
    """Return int64 [B, 1, 1, T + 2] instead of a mask [B, 1, Q, T].

    It contains the document of every key in a packed sequence, counted from 1, or 0 for padding. The last two
    are the column of the first query and the sliding window. Custom masks remain sdpa's.
    """
    summary = torch.ones(
        batch_size, kv_length + 2, dtype=torch.long, device=options.get("device", "cpu")
    )
    given, first = options.get("attention_mask"), options.get("kv_offset", 0)
    if options.get("use_vmap") or not (
        options.get("allow_is_causal_skip", True) or q_length == 1
    ):
        packed = not options.get("use_vmap") and given is None and q_length == kv_length
        documents = (
            count_documents(options["mask_function"], summary[:, :-2])
            if packed
            else None
        )
        if documents is None:
            return sdpa_mask(
                batch_size,
                q_length,
                kv_length,
                **options | {"allow_is_causal_skip": False},
            )
        summary[:, :-2] = documents
    if given is not None:
        given = given[:, first : first + kv_length]
        summary[:, :kv_length] = nn.functional.pad(
            given.long(), (0, kv_length - given.shape[1])
        )
    summary[:, kv_length] = options.get("q_offset", 0) - first
    summary[:, kv_length + 1] = options.get("local_size") or FAR
    return summary[:, None, None]


def count_documents(mask_function: Any, ones: Tensor) -> Tensor | None:
    """Return the documents [B, T] of packed sequences by the mask of adjacent tokens; None if not causal."""
    rows = torch.arange(len(ones), device=ones.device)[:, None]
    columns = torch.arange(ones.shape[1], device=ones.device)[None]
    if mask_function(rows, 0, columns[:, :-1], columns[:, 1:]).any():
        return None
    begins = ~mask_function(rows, 0, columns[:, 1:], columns[:, :-1])
    return ones + nn.functional.pad(begins.long(), (1, 0)).cumsum(-1)


class Sight(NamedTuple):
    """The positions of queries and keys in a step, and the mask between them.

    Args:
        queries: The positions of the queries [B or 1, Q].
        keys: The positions of the keys [B or 1, T]; cached tokens are consecutive, padding does not count.
        documents: The documents of the keys [B or 1, T], from 1; 0 for padding and empty static cache slots.
        column: The column of the first query.
        window: The sliding window in keys; `FAR` for none.
        given: A mask [B or 1, 1, Q, T], boolean or added to the scores, that is used instead.
    """

    queries: Tensor
    keys: Tensor
    documents: Tensor
    column: int
    window: int = FAR
    given: Tensor | None = None

    @classmethod
    def of(
        cls, mask: Tensor | None, query: Tensor, key: Tensor, position_ids: Tensor
    ) -> "Sight":
        """Make it from `short_mask`'s result, a mask [B or 1, 1, Q, T] or None, and the query positions."""
        count, keys, device = query.shape[2], key.shape[2], query.device
        rows = torch.arange(count, device=device)
        columns = torch.arange(keys, device=device)
        documents = torch.ones_like(columns)[None]
        column, window, given = keys - count, FAR, None
        if mask is not None and mask.dtype == torch.long:
            documents = mask[:, 0, 0, :keys]
            column, window = mask[0, 0, 0, keys:].tolist()
        elif mask is not None:
            given = mask
            if count < keys:
                seen = (
                    mask[:, 0]
                    if mask.dtype == torch.bool
                    else mask[:, 0] > torch.finfo(mask.dtype).min / 2
                )
                # A query other than padding: itself
                last = torch.where(seen, columns, -1).amax(-1)
                column = int((last - rows).amax().clamp(min=0))
                documents = seen.any(1).long()
        if count == keys:
            return cls(position_ids, position_ids, documents, column, window, given)
        passed = (documents > 0).long().cumsum(-1)
        own = documents[:, column : column + count] > 0
        # The last query that is no padding
        anchor = torch.where(own, rows, 0).amax(-1, keepdim=True)
        behind = passed.gather(1, column + anchor) - passed
        batch = max(len(position_ids), len(anchor))
        at = position_ids.expand(batch, -1).gather(1, anchor.expand(batch, -1)) - behind
        return cls(position_ids, at, documents, column, window, given)

    @property
    def causal(self) -> bool:
        """Whether stock attention needs no mask: one query or all, without padding."""
        count, keys = self.queries.shape[-1], self.documents.shape[-1]
        narrow = self.given is not None or self.window < keys
        aligned = count in (1, keys) and self.column == keys - count
        return aligned and not narrow and bool((self.documents == 1).all())

    def columns(self, rows: slice) -> slice:
        """Return the columns from the first to the last unmasked key of any query in some rows."""
        if self.given is not None:
            return slice(0, self.documents.shape[-1])
        first = self.column + rows.start
        end = min(self.column + rows.stop, self.documents.shape[-1])
        oldest = self.documents[:, first:end].amin(-1, keepdim=True)
        begin = int((self.documents[:, :end] >= oldest).any(0).long().argmax())
        return slice(max(begin, first - self.window + 1), end)

    def mask(self, rows: slice, columns: slice) -> Tensor:
        """Return the mask [B or 1, 1, q, t] of some rows and columns, boolean or added to the scores."""
        if self.given is not None:
            return self.given[:, :, rows, columns]
        device = self.documents.device
        n = torch.arange(columns.start, columns.stop, device=device)
        m = torch.arange(
            self.column + rows.start, self.column + rows.stop, device=device
        )[:, None]
        seen = (n <= m) & (n > m - self.window)
        theirs, mine = self.documents[:, None, columns], self.documents[:, m]
        if not bool((theirs == 1).all()):
            seen = seen & (theirs > 0) & ((mine == 0) | (mine == theirs))
        return seen.expand(len(mine), -1, -1)[:, None]


def in_blocks(
    score: Callable[[Tensor, slice, slice], Tensor],
    query: Tensor,
    value: Tensor,
    sight: Sight,
    dropout: float = 0.0,
    *,
    width: int = 0,
    added: Callable[[Tensor, slice, slice], Tensor | None] = lambda *_: None,
) -> Tensor:
    """Return attention [B, Q, H, F] to values [B, K, T, F].

    It computes one block of queries at a time, so memory grows linearly with the length. In training the
    backward pass computes every block again.

    Args:
        score: Returns the scores [B, H, q, t] of queries [B, H, q, E] in some rows with the keys in some
            columns, in float32 or wider, before masking.
        query: [B, H, Q, E].
        value: [B, K, T, F].
        sight: The positions and the mask.
        dropout: The dropout probability of the weights.
        width: The numbers that `score` computes per query and head, if more than T.
        added: Returns an addition to the output for weights [B, H, q, t] of some rows and columns, or None.
    """
    (batch, heads, count, _), keys = query.shape, value.shape[2]

    def read(own: Tensor, rows: slice) -> Tensor:
        columns = sight.columns(rows)
        with torch.autocast(own.device.type, enabled=False):
            scores, mask = score(own, rows, columns), sight.mask(rows, columns)
            # The mean, not NaN, for padding without any key
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            else:
                scores = scores + mask.to(scores.dtype)
            weights = nn.functional.dropout(scores.softmax(-1), dropout)
            output = by_head(weights.to(value.dtype), value[:, :, columns])
            if (more := added(weights, rows, columns)) is not None:
                output = output + more.to(output.dtype)
        return output.transpose(1, 2)

    at_a_time = SCORES["cuda" if query.is_cuda else "cpu"]
    size = max(1, at_a_time // (batch * heads * max(keys, width)))
    blocks = [slice(row, min(row + size, count)) for row in range(0, count, size)]
    again = torch.is_grad_enabled() and len(blocks) > 1
    run: Any = partial(checkpoint, read, use_reentrant=False) if again else read
    return torch.cat([run(query[:, :, rows], rows) for rows in blocks], 1)


def ends_of_blocks(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and the maximum [B, T / 128] of every block of [B, T]."""
    count = numbers.shape[-1]
    whole = -(-count // KERNEL_BLOCK) * KERNEL_BLOCK
    columns = torch.arange(whole, device=numbers.device).clamp(max=count - 1)
    return torch.aminmax(numbers[:, columns].unflatten(-1, (-1, KERNEL_BLOCK)), dim=-1)


def block_mask(band: Band, sight: Sight, span: slice, batch: int) -> BlockMask:
    """Return FlexAttention's mask of a band, for the keys in some columns.

    The minimum and maximum of positions, columns and documents decide whether a block is skipped or needs no
    mask, without a [Q, T] tensor.
    """

    def of_all(numbers: Tensor) -> Tensor:
        return numbers.expand(batch, -1).clone(memory_format=torch.contiguous_format)

    count, last = sight.queries.shape[-1], sight.column - span.start
    begin, end = of_all(band.begin(sight.queries)), of_all(band.end(sight.queries))
    at, theirs = of_all(sight.keys[:, span]), of_all(sight.documents[:, span])
    mine = of_all(sight.documents[:, sight.column : sight.column + count])
    newest = of_all(torch.arange(last, last + count, device=at.device)[None])
    oldest = (newest + 1 - sight.window).clamp(min=0)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        within = (
            (at[b, j] >= begin[b, i])
            & (at[b, j] < end[b, i])
            & (j >= oldest[b, i])
            & (j <= newest[b, i])
        )
        return (
            within
            & (theirs[b, j] > 0)
            & ((mine[b, i] == 0) | (mine[b, i] == theirs[b, j]))
        )

    column = torch.arange(0, at.shape[-1], KERNEL_BLOCK, device=at.device)[None]
    last_column = column + KERNEL_BLOCK - 1
    begins = ends_of_blocks(theirs), ends_of_blocks(mine)
    # Extremes of the keys' blocks and of the queries': a pair is visible if each key's is not the smaller
    bounds = [
        (ends_of_blocks(at), ends_of_blocks(begin)),
        (ends_of_blocks(-at), ends_of_blocks(1 - end)),
        ((column, last_column), ends_of_blocks(oldest)),
        ((-last_column, -column), ends_of_blocks(-newest)),
        begins,
    ]
    (theirs0, theirs1), (mine0, _) = begins
    some: Any = True
    every = (theirs0 > 0)[:, None] & (theirs1[:, None] == mine0[:, :, None])
    for (least, greatest), (low, high) in bounds:
        some = some & (greatest[:, None] >= low[:, :, None])
        every = every & (least[:, None] >= high[:, :, None])

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]

    sizes: Any = {"BLOCK_SIZE": KERNEL_BLOCK, "seq_lengths": (count, at.shape[-1])}
    return BlockMask.from_kv_blocks(
        *listed(some & ~every), *listed(some & every), mask_mod=seen, **sizes
    )


def has_kernel(value: Tensor) -> bool:
    """Return whether to use FlexAttention for these values: on GPUs with native bfloat16."""
    fits = value.is_cuda and value.dtype.itemsize == 2 and value.shape[3] >= NARROWEST
    if not fits or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(value.device) >= (8, 0)


def by_kernel(
    bands: list[tuple[Band, slice]],
    queries: list[Tensor],
    keys: list[Tensor],
    value: Tensor,
    sight: Sight,
    scale: float,
) -> Tensor:
    """Return attention [B, H, Q, D] by FlexAttention, one band at a time, combined by log-sum-exp.

    Args:
        bands: The bands, each with the columns of its keys.
        queries: The rotated queries of each band [B, H, Q, D].
        keys: The rotated keys of each band [B, K, t, D].
        value: [B, K, T, D].
        sight: The positions and the mask.
        scale: The factor of the scores.
    """
    from torch._dynamo import config as compiling  # takes seconds to import

    outputs, sums = [], []
    for (band, span), q, k in zip(bands, queries, keys, strict=True):
        options: dict[str, Any] = {"scale": scale, "enable_gqa": True}
        options |= flex.get_flex_attention_lse_kwargs(True)
        q, k, v = (x.contiguous() for x in (q, k, value[:, :, span]))
        mask = block_mask(band, sight, span, len(q))
        with compiling.patch(recompile_limit=VARIANTS):
            output, more = flex.compile_friendly_flex_attention(
                q, k, v, block_mask=mask, **options
            )
        outputs.append(output)
        sums.append(getattr(more, "lse", more))
    # Padding without any key
    shares = torch.stack(sums).softmax(0).nan_to_num(0)[..., None]
    return (torch.stack(outputs) * shares).sum(0).to(value.dtype)


def by_head(one: Tensor, shared: Tensor) -> Tensor:
    """Return [B, H, q, X] @ [B, K, X, Y] as [B, H, q, Y], for H/K heads that share a key-value head."""
    rows = one.reshape(len(one), shared.shape[1], -1, one.shape[-1]) @ shared
    return rows.view(*one.shape[:3], -1)


def temperature(m: Tensor, window: int, log_n: bool, attention_factor: float) -> Tensor:
    """Return the factor of the scores of queries at m [...], `precise`."""
    factor = torch.ones_like(precise(m))
    if log_n:
        factor = ((precise(m) + 1).clamp(min=1).log() / math.log(window)).clamp(min=1)
    return factor * attention_factor**2


class Unrotated:
    """A rotary module that does not rotate queries and keys: attention gives them positions."""

    stock: nn.Module
    config: Any
    attention: ClassVar[str] = NAME
    layer_type: tuple[str, ...] = ()  # of the remapped layers, if RoPE differs by it

    def forward(
        self, x: Tensor, position_ids: Tensor, *layer_type: str
    ) -> tuple[Tensor, Tensor]:
        """Return ones and zeros; the stock cos and sin for layer types that are not remapped."""
        set_to = self.config._attn_implementation
        if set_to != self.attention:
            raise ValueError(f"{set_to!r} would ignore this model's positions")
        cos, sin = self.stock(x, position_ids, *layer_type)
        if layer_type != self.layer_type:
            return cos, sin
        return torch.ones_like(cos), torch.zeros_like(sin)


class RemappedRotation(Unrotated):
    """The rotation of queries and keys by a remapping."""

    def set_remapping(self, described: dict[str, Any]) -> None:
        """Set the remapping described in config.json."""
        parameters = dict(described["parameters"])
        self.window = described["window"]
        self.modifiers = {
            key: parameters.pop(key) for key in ("log_n", "attention_factor")
        }
        if described["layer_type"]:
            self.layer_type = (described["layer_type"],)
        # Called on use, since its functions cannot be pickled
        self.bands = partial(REMAPPINGS[described["name"]], **parameters)

    def rotated(self, module: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate queries or keys [B, H, T, D] at positions [B or 1, T] with the stock function."""
        cos, sin = (
            table.to(x.device) for table in self.stock(x, positions, *self.layer_type)
        )
        return rotate(module, x, cos, sin)


def rotate(module: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, H, T, D] with the function in the module of an attention class."""
    width = cos.shape[-1]
    apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
    out, _ = apply(x[..., :width], x[:, :0, :, :width], cos, sin)
    return out if width == x.shape[-1] else torch.cat((out, x[..., width:]), -1)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    scaling: float,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention [B, Q, H, D] of unrotated queries [B, H, Q, D], keys and values [B, K, T, D]."""
    sight = Sight.of(attention_mask, query, key, position_ids)
    rope: RemappedRotation | None = module.__dict__[POSITIONS_SLOT]
    m, n = sight.queries, sight.keys
    wide = torch.promote_types(query.dtype, torch.float32)
    bands, factor = [(EVERY, slice(0, key.shape[2]))], torch.ones_like(m)
    # Without a remapping, or with a sliding window within L: one band for the whole mask.
    mapped = rope is not None and sight.window > rope.window
    if rope is not None and mapped:
        bands = [
            (band, span) for band in rope.bands() if (span := band.span(m, n)).stop
        ]
        factor = temperature(m, rope.window, **rope.modifiers)

    def at(x: Tensor, positions: Tensor) -> Tensor:
        return x if rope is None else rope.rotated(module, x, positions)

    def rotated_query(x: Tensor, band: Band, rows: slice, scale: float) -> Tensor:
        x = at(x, band.query(m[:, rows])).to(wide) * scale
        return (x * factor[:, None, rows, None].to(wide)).to(value.dtype)

    keys = [
        at(key[:, :, span], band.key(n[:, span])).to(value.dtype)
        for band, span in bands
    ]
    rows = slice(0, query.shape[2])
    alone = len(bands) == 1 and sight.causal
    if alone and bool(bands[0][0].begin(m).amax() <= n.amin()):
        own = rotated_query(query, bands[0][0], rows, 1.0)
        output, _ = sdpa_attention_forward(
            module, own, keys[0], value, None, dropout, scaling, is_causal=True
        )
        return output, None

    plain = not dropout and sight.given is None and rows.stop >= KERNEL_BLOCK
    if mapped and plain and has_kernel(value):
        queries = [rotated_query(query, band, rows, 1.0) for band, _ in bands]
        output = by_kernel(bands, queries, keys, value, sight, scaling)
        return output.transpose(1, 2).contiguous(), None

    def score(own: Tensor, rows: slice, columns: slice) -> Tensor:
        here, there = m[:, rows], n[:, columns]
        shape = (*own.shape[:3], columns.stop - columns.start)
        scores = torch.full(shape, torch.finfo(wide).min, dtype=wide, device=own.device)
        for (band, whole), k in zip(bands, keys, strict=True):
            span, skip = band.span(here, there), columns.start - whole.start
            if span.stop:
                k = k[:, :, span.start + skip : span.stop + skip]
                found = by_head(rotated_query(own, band, rows, scaling), k.mT).to(wide)
                holds = band.holds(here, there[:, span])[:, None]
                scores[..., span] = torch.where(holds, found, scores[..., span])
        return scores

    return in_blocks(score, query, value, sight, dropout), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, short_mask)


class RemappedRotary(RemappedRotation, nn.Module):
    """Replaces the rotary module and keeps it as a submodule, so that transformers initialises it."""

    def __init__(self, stock: nn.Module, config: Any) -> None:
        super().__init__()
        self.stock, self.config = stock, config
        self.set_remapping(config.position_remapping)


class RemappedLlamaConfig(LlamaConfig):
    """The stock configuration with the remapping."""

    model_type = MODEL_TYPE
    position_remapping: dict[str, Any] | None = None


def rename_alike() -> None:
    """Make transformers rename loaded weights as it does for the stock model."""
    own_names = {
        LlamaConfig.model_type: MODEL_TYPE,
        LlamaForCausalLM.__name__: RemappedLlamaForCausalLM.__name__,
    }
    for stock_name, own_name in own_names.items():
        if conversion := names.get_checkpoint_conversion_mapping(stock_name):
            names.register_checkpoint_conversion_mapping(
                own_name, conversion, overwrite=True
            )


class RemappedLlamaForCausalLM(LlamaForCausalLM):
    """The stock model with remapped attention."""

    config_class = RemappedLlamaConfig
    # Another engine's attention would use unrotated queries and keys
    _supports_attention_backend = False
    _supports_flash_attn = _supports_flex_attn = _can_compile_fullgraph = False

    def __init__(self, config: RemappedLlamaConfig) -> None:
        """Make the stock model and replace its rotary module."""
        super().__init__(config)
        rename_alike()
        described: Any = config.position_remapping
        rope = RemappedRotary(self.get_submodule(ROTARY), config)
        self.set_submodule(ROTARY, rope)
        layers = described["layers"]
        for module in self.modules():
            if isinstance(index := getattr(module, "layer_idx", None), int):
                module.__dict__[POSITIONS_SLOT] = (
                    rope if layers is None or index in layers else None
                )
        config._attn_implementation = NAME
