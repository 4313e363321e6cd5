"""The model over very long texts: the same weights and formulas, in memory linear in the length.

Four things differ from a training forward:
- keys and values stay in a cache, allocated once, and the text passes through in chunks;
- attention works on tiles, a block of queries against some of its keys. A tile's log-prior depends
  on i - j only (times a factor of the row): a strided view of one vector per head;
- blocks of keys that the prior makes too small to change a float32 result are skipped (see
  `needed_blocks`), so that a head whose prior falls off costs linear time;
- the last layer and the output layer run only for the positions that are asked for.

The tiles of a query are joined by Bayes' rule. The posterior on the keys of a tile A alone is
softmax over A, with the expectation y_A and the evidence E_A = sum_A e^score. Over two tiles it is
the mixture y = (E_A y_A + E_B y_B) / (E_A + E_B).

Scores, softmax and sums are float32 whatever the cache holds. A row is one document, with any
end-of-text marker inside it.
"""

import math
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model import GPT, LOSS_CHUNK, CausalSelfAttention, ModelConfig

BLOCK = 256  # queries of a block, and keys of a block that is computed or skipped
SKIP_TOLERANCE = 1e-8  # posterior mass to leave out in all; float32 rounds by up to 6e-8
CHUNK_TOKENS = 2**11  # tokens through a layer at once, on a CPU
TILE_SCORES = 2**19  # scores at once, on a CPU: 2 MiB stay in its cache
CUDA_CHUNK_TOKENS = 2**14
CUDA_TILE_SCORES = 2**26  # at most; fewer where little memory is free
PIECE = 2**14  # tokens between two signs of progress
HIDDEN = torch.finfo(torch.float32).min  # finite: a tile may hide all keys of a row, without a NaN


def cache_dtype(device: torch.device) -> torch.dtype:
    """float32 on a CPU. float16 on CUDA: three bits more than bfloat16, from 6e-5 to 65,504. Should
    a key or value lie beyond, it ends in NaN, and dtype=torch.bfloat16 helps."""
    return torch.float16 if device.type == "cuda" else torch.float32


def require_memory(cfg: ModelConfig, batch: int, length: int, device, dtype=None) -> None:
    """ValueError if a device could not hold keys and values even if it held nothing else."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu" and hasattr(os, "sysconf"):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:  # the meta device, which holds nothing, or a system that does not tell
        return
    size = (dtype or cache_dtype(device)).itemsize
    if (needed := 2 * cfg.n_layer * batch * length * cfg.n_embd * size) > total:
        raise ValueError(
            f"the cache of {batch} x {length:,} tokens takes {needed / 2**30:.1f} GiB, and {device}"
            f" has {total / 2**30:.1f} GiB; choose a shorter length"
        )


def block_maxima(values: Tensor) -> Tensor:
    """(H, n) -> (H, blocks): the largest of each BLOCK values, the last of which may be fewer."""
    padded = F.pad(values, (0, -values.shape[1] % BLOCK), value=-torch.inf)
    return padded.unflatten(1, (-1, BLOCK)).amax(-1)


class LayerCache:
    """What one layer knows of the tokens so far: keys, values (B, H, length, D) and its prior."""

    @torch.no_grad()
    def __init__(self, attn: CausalSelfAttention, batch: int, length: int, dtype: torch.dtype):
        H, device = attn.cfg.n_head, attn.qkv.weight.device
        self.keys = torch.empty(batch, H, length, attn.cfg.head_dim, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        # the largest |k| of each block, over the batch
        self.norms = torch.zeros(H, -(-length // BLOCK), device=device)
        prior = attn.log_prior(length)
        if prior is None:
            prior = torch.zeros(1, length, device=device)
        # d^-10 soon is a denormal number, with which a CPU computes several times as slowly
        prior = prior.masked_fill(prior.abs() < torch.finfo(torch.float32).tiny, 0.0)
        # from the farthest distance to 0, then the future
        self.reversed_prior = F.pad(prior.flip(-1), (0, BLOCK), value=-torch.inf).expand(H, -1)
        # the block of keys b + 1 before a block of queries has distances of the blocks b and b + 1
        peaks = block_maxima(prior)
        self.ceilings = torch.maximum(peaks[:, :-1], peaks[:, 1:]).expand(H, -1)
        # blocks of keys that each head computed and could have, over the blocks of queries so far
        self.computed, self.visible = torch.zeros(H, dtype=torch.int64), 0

    def append(self, start: int, k: Tensor, v: Tensor) -> None:
        """Put k, v (B, H, T, D) at the places from `start` on."""
        end, first = start + k.shape[2], start // BLOCK
        self.keys[:, :, start:end], self.values[:, :, start:end] = k, v
        norms = block_maxima(self.keys[:, :, first * BLOCK : end].float().norm(dim=-1).amax(0))
        self.norms[:, first : first + norms.shape[1]] = norms


class KVCache:
    """Keys and values of all layers for `batch` rows of up to `length` tokens; `used` are filled.

    exact: compute every block of keys, also those that cannot change a float32 result.
    """

    def __init__(self, model: GPT, batch: int, length: int, exact: bool = False, dtype=None):
        device = model.embedding.weight.device
        dtype = dtype or cache_dtype(device)
        require_memory(model.cfg, batch, length, device, dtype)
        self.dtype, self.window = dtype, model.window
        self.batch, self.length, self.exact, self.used = batch, length, exact, 0
        self.layers = [LayerCache(block.attn, batch, length, dtype) for block in model.blocks]
        self.chunk_tokens, self.tile_scores = CHUNK_TOKENS, TILE_SCORES
        if device.type == "cuda":
            reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free = torch.cuda.mem_get_info(device)[0] + reusable
            self.chunk_tokens = CUDA_CHUNK_TOKENS
            # a tile holds scores and weights, 4 bytes each; half of the memory stays
            self.tile_scores = min(CUDA_TILE_SCORES, free // 16)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens, to continue from there with others."""
        self.used = length

    def skipped(self) -> Tensor:
        """Share of the visible blocks of keys that were skipped so far: (layers, H)."""
        shares = [layer.computed.double() / max(1, layer.visible) for layer in self.layers]
        return 1 - torch.stack(shares)


class Queries(NamedTuple):
    """A block of queries at stop - R ... stop - 1, the last one first: so its strips are views."""

    q: Tensor  # (B, H, R, D), scaled as `project` does
    scale: Tensor  # (R, 1): what multiplies the log-prior in each row
    stop: int
    window: int | None  # keys further away than this are hidden


def prior_strip(reversed_prior, heads, rows: int, begin: int, end: int, stop: int) -> Tensor:
    """Log-prior (h, rows, end - begin) of the queries stop - 1, stop - 2, ... by keys from `begin`.

    reversed_prior (H, length + BLOCK) has the distances length - 1 ... 0, then -inf for the future.
    From key to key and from row to row the distance falls by one, so each row is the vector from
    one place further on, and the result a view of it.
    """
    place, keys = reversed_prior.shape[-1] - BLOCK - stop + begin, end - begin
    return reversed_prior[:, place : place + keys + rows - 1][heads].unfold(-1, keys, 1)


def attend_tile(layer: LayerCache, queries: Queries, heads, begin: int, end: int):
    """The posterior over the keys begin ... end - 1 alone, for some of the heads (h of them).

    Returns the expectation of the values (B, h, R, D) and the log-evidence (B, h, R, 1), from the
    largest weight w = e^(top - ln E), which is at least 1 / keys.
    """
    q, keys = queries.q[:, heads], layer.keys[:, heads, begin:end]
    values, rows = layer.values[:, heads, begin:end], q.shape[2]
    strip = prior_strip(layer.reversed_prior, heads, rows, begin, end, queries.stop)
    scores = (q @ keys.float().transpose(-2, -1)).addcmul_(strip, queries.scale)  # (B, h, R, S)
    if queries.window is not None and queries.stop - 1 - begin > queries.window:
        i = torch.arange(queries.stop - 1, queries.stop - 1 - rows, -1, device=q.device)
        j = torch.arange(begin, end, device=q.device)
        scores.masked_fill_(i[:, None] - j > queries.window, HIDDEN)
    top, weights = scores.amax(-1, keepdim=True), scores.softmax(-1)
    return weights @ values.float(), top - weights.amax(-1, keepdim=True).log()


def needed_blocks(queries: Queries, log_evidence, norms, ceilings, exact: bool) -> Tensor:
    """Which far blocks of keys may matter to a block of queries: (H, blocks) bool.

    log_evidence (B, H, R, 1): ln E of the near keys, which are always computed; norms and ceilings
    (H, blocks): the largest |k| of each far block, and the largest log-prior at its distances,
    before the row's scale (above 0).

    By Cauchy-Schwarz no key of a block scores more than u = |q_i| max|k| + max_d(scale_i prior_d)
    in row i. A product with the scale is largest at its smallest or its largest of the rows,
    whatever the prior's sign and shape. Blocks with u - ln E <= ln(SKIP_TOLERANCE / n) in all rows,
    n being the number of all keys, are skipped. All skipped keys together then have at most the
    evidence n E SKIP_TOLERANCE / n: a posterior mass m <= SKIP_TOLERANCE. With the kept mean y and
    the skipped mean z the result (1 - m) y + m z differs from y by m (z - y): by less than float32
    can tell from y, in units of the largest value.
    """
    if exact:
        return torch.ones_like(norms, dtype=torch.bool)
    content = queries.q.norm(dim=-1).amax((0, 2))[:, None] * norms
    prior = torch.maximum(ceilings * queries.scale.min(), ceilings * queries.scale.max())
    excess = content + prior - log_evidence.amin((0, 2))  # (H, blocks), nats
    return ~(excess <= math.log(SKIP_TOLERANCE / queries.stop))  # a NaN is never skipped over


def attend_block(cache: KVCache, layer: LayerCache, queries: Queries) -> Tensor:
    """Posterior expectation of the values for a block of queries: (B, H, R, D), the last first. All
    heads read the near keys, those of the queries' own block and the one before. Then, tile by
    tile, the heads that need them read the far keys."""
    B, H, rows, D = queries.q.shape
    own, lowest = (queries.stop - 1) // BLOCK, 0
    if queries.window is not None:
        lowest = max(0, queries.stop - rows - queries.window) // BLOCK
    near = max(lowest, own - 1)
    y, log_evidence = attend_tile(layer, queries, slice(None), near * BLOCK, queries.stop)
    layer.computed += own + 1 - near
    layer.visible += own + 1 - lowest
    if near == lowest:
        return y
    ceilings = layer.ceilings[:, own - near : own - lowest].flip(-1)  # by block, as norms are
    norms = layer.norms[:, lowest:near]
    needed = needed_blocks(queries, log_evidence, norms, ceilings, cache.exact)
    # a tile also holds keys and values in float32, where the cache has another format
    copies = 0 if cache.dtype == torch.float32 else D
    size = max(1, cache.tile_scores // (B * H * (rows + copies) * BLOCK))  # blocks in a tile
    padded = F.pad(needed, (0, -needed.shape[-1] % size))
    tiles = padded.unflatten(-1, (-1, size)).any(-1).cpu()  # (H, tiles)
    for tile in tiles.any(0).nonzero().flatten().tolist():
        first, last = lowest + tile * size, min(lowest + (tile + 1) * size, near)
        heads = tiles[:, tile].nonzero().flatten().tolist()
        layer.computed[heads] += last - first
        if heads[-1] - heads[0] + 1 == len(heads):  # neighbours: a slice copies nothing
            heads = slice(heads[0], heads[-1] + 1)
        y_far, log_far = attend_tile(layer, queries, heads, first * BLOCK, last * BLOCK)
        log_near = log_evidence[:, heads]
        total = torch.logaddexp(log_near, log_far)
        y[:, heads] = y[:, heads] * (log_near - total).exp() + y_far * (log_far - total).exp()
        log_evidence[:, heads] = total
    return y


def attend(cache: KVCache, layer: LayerCache, q: Tensor, stop: int, row_scale: Tensor) -> Tensor:
    """Attention of the queries q (B, H, R, D) at stop - R ... stop - 1, in blocks that end where
    blocks of keys do. Only a query with a single key has the scale ln n = 0. Its weight is 1 at any
    scale, and one just above 0 keeps its future at -inf, where 0 would make it NaN."""
    out, begin = torch.empty_like(q), stop - q.shape[2]
    scale = row_scale[0, 0].clamp(min=1e-30)
    while begin < stop:
        end = min(stop, (begin // BLOCK + 1) * BLOCK)
        rows = slice(begin - stop + q.shape[2], end - stop + q.shape[2])
        queries = Queries(q[:, :, rows].float().flip(2), scale[rows].flip(0), end, cache.window)
        out[:, :, rows] = attend_block(cache, layer, queries).flip(2)
        begin = end
    return out


def forward_chunk(model: GPT, idx: Tensor, cache: KVCache, wanted: int) -> Tensor:
    """Run T more tokens (B, T) through all layers; returns the last `wanted` outputs, (B, ., C)."""
    T, start = idx.shape[1], cache.used
    positions = torch.arange(start, start + T, device=idx.device)[None]
    x, layout = model.embed(idx, positions), model.layout(positions)
    for block, layer in zip(model.blocks, cache.layers, strict=True):
        q, k, v = block.attn.project(block.norm_attn(x), layout)
        _, row_scale = block.attn.ssmax(layout.log_n)
        layer.append(start, k, v)
        if layer is cache.layers[-1]:
            last = slice(T - wanted, None)
            x, q, row_scale = x[:, last], q[:, :, last], row_scale[:, :, last]
        y = attend(cache, layer, q, start + T, row_scale)
        x = x + block.attn.out(y.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm_mlp(x))
    cache.used += T
    return x


def run_layers(model: GPT, idx: Tensor, cache: KVCache, wanted: int) -> Tensor:
    """Append idx (B, T) to the cache, in chunks; returns the last `wanted` outputs, (B, ., C)."""
    B, T = idx.shape
    if cache.batch != B or cache.used + T > cache.length:
        room = f"a cache of {cache.batch} x {cache.length}"
        raise ValueError(f"{B} x {cache.used} + {T} tokens do not fit {room}")
    outputs, step = [], max(1, cache.chunk_tokens // B)
    for begin in range(0, T, step):
        end = min(begin + step, T)
        rows = max(0, min(end - (T - wanted), end - begin))  # the wanted ones of this chunk
        outputs.append(forward_chunk(model, idx[:, begin:end], cache, rows))
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def prefill(model: GPT, idx: Tensor, cache: KVCache, wanted: int = 0) -> Tensor:
    """Append idx (B, T) to the cache; returns the logits of its last positions, (B, wanted, V)."""
    return model.logits(run_layers(model, idx, cache, wanted))


@torch.no_grad()
def score(model: GPT, idx: Tensor, n_last: int, cache=None) -> tuple[Tensor, Tensor]:
    """How likely are the last n_last tokens of idx (B, T), each given the true ones before it?

    Returns their log-probabilities in nats and the most likely tokens there, both (B, n_last). With
    a cache, idx continues its text, and afterwards the cache holds all but the last token.
    """
    B, T = idx.shape
    x = run_layers(model, idx[:, :-1], cache or KVCache(model, B, T - 1), n_last)
    log_p, best, rows = [], [], max(1, LOSS_CHUNK // (B * model.cfg.padded_vocab))
    for part, target in zip(x.split(rows, 1), idx[:, -n_last:].split(rows, 1), strict=True):
        logits = model.logits(part).float()
        log_p.append(logits.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1))
        best.append(logits.argmax(-1))
    return torch.cat(log_p, 1), torch.cat(best, 1)


class Reader:
    """Scores texts one after the other. The beginning that a text shares with the one before it
    stays in the cache, which holds `length` tokens; options: as of KVCache."""

    def __init__(self, model: GPT, length: int, **options):
        self.model, self.cache, self.before = model, KVCache(model, 1, length, **options), []

    def score(self, tokens: list[int], n_last: int, advance=lambda begin, end: None):
        """`score` of the last n_last tokens, (n_last,) each. advance(begin, end) is called when the
        tokens from begin to end are done."""
        device, first = self.model.embedding.weight.device, len(tokens) - n_last - 1
        begin = len(os.path.commonprefix([self.before[: self.cache.used], tokens[:first]]))
        self.cache.rewind(begin)
        self.before = tokens
        advance(0, begin)
        while begin < first:
            end = min(first, begin + PIECE)
            prefill(self.model, torch.tensor([tokens[begin:end]], device=device), self.cache)
            advance(begin, end)
            begin = end
        rest = torch.tensor([tokens[begin:]], device=device)
        log_p, best = score(self.model, rest, n_last, self.cache)
        advance(begin, len(tokens))
        return log_p[0], best[0]


@torch.no_grad()
def generate(
    model: GPT, idx: Tensor, max_new_tokens: int, temperature=0.0, stop=None, cache=None
) -> Tensor:
    """Continue idx (B, T) by up to max_new_tokens: (B, new). Greedy at temperature 0, otherwise
    sampled; ends when every row has produced the token `stop`. With a cache, idx continues it."""
    cache = cache or KVCache(model, idx.shape[0], idx.shape[1] + max_new_tokens)
    new, piece = idx[:, :0], idx
    for _ in range(max_new_tokens):
        logits = prefill(model, piece, cache, wanted=1)[:, 0].float()
        if temperature > 0:
            piece = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            piece = logits.argmax(-1, keepdim=True)
        new = torch.cat((new, piece), dim=1)
        if stop is not None and (new == stop).any(dim=1).all():
            break
    return new
