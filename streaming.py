"""The model of model.py over very long texts: the same weights and the same formulas, in memory linear in the length.

Three things are different from a training forward:
- keys and values are kept in a cache that is allocated once, and the text passes through the model in chunks;
- attention works on blocks of queries. A block needs the log-prior of its rows against all keys, a strip whose element
  (i, j) depends on i - j only (times ln n of the row). The strip is a strided view of one vector per head, never
  computed by element;
- the last layer's attention and MLP, and the output layer, run only for the positions that are asked for.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from model import GPT, CausalSelfAttention, Layout

CHUNK_TOKENS = 2048  # tokens that pass through a layer at once, over the batch
STRIP_ELEMENTS = 2**18  # queries x keys of a strip: 1 MiB a head, so that it stays in a CPU's cache


class KVCache:
    """Keys and values of every layer for up to `length` tokens, each (B, H, length, D); `used` of them are filled."""

    def __init__(self, model: GPT, batch: int, length: int):
        cfg, weight = model.cfg, model.embedding.weight
        shape = (batch, cfg.n_head, length, cfg.head_dim)
        self.keys = [torch.empty(shape, device=weight.device) for _ in range(cfg.n_layer)]
        self.values = [torch.empty(shape, device=weight.device) for _ in range(cfg.n_layer)]
        self.batch, self.length, self.used = batch, length, 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v (B, H, T, D) behind the `used` ones; returns all keys and values so far, as views."""
        end = self.used + k.shape[2]
        self.keys[layer][:, :, self.used : end] = k
        self.values[layer][:, :, self.used : end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def fork(self, batch: int) -> "KVCache":
        """A copy with the same room and `batch` rows, a multiple of this cache's: row r is copied from row
        r * self.batch // batch. For texts that share a beginning, which is then computed once."""
        new = copy.copy(self)
        new.batch, new.keys, new.values = batch, [], []
        for old, copies in ((self.keys, new.keys), (self.values, new.values)):
            for tensor in old:
                room = tensor.new_empty((batch, *tensor.shape[1:]))
                room[:, :, : self.used] = tensor[:, :, : self.used].repeat_interleave(batch // self.batch, dim=0)
                copies.append(room)
        return new


def prior_strip(prior: Tensor, rows: int, log_n: Tensor | None) -> Tensor:
    """Log-prior of the last `rows` of S queries, the last query first, by S keys: (H, S) by distance -> (H, rows, S).

    Row r belongs to query S - 1 - r. It is the reversed vector from place r on, with r hidden (-inf) future keys
    behind it: in this order the strip is a plain view of one padded vector. With log_n (rows, 1), in the same order,
    row r is multiplied by ln n, which needs a copy. Only a query that sees a single key has ln n = 0; its weight is 1
    whatever the scale, and a scale just above 0 keeps hidden keys at -inf where 0 would make them NaN.
    """
    strip = F.pad(prior.flip(-1), (0, rows - 1), value=-torch.inf).unfold(-1, prior.shape[-1], 1)
    return strip if log_n is None else strip * log_n.clamp(min=1e-30)


def attend(
    attn: CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, prior: Tensor, layout: Layout, window: int | None
) -> Tensor:
    """Posterior expectation of the values for the last R of S positions.

    q (B, H, R, D), k, v (B, H, S, D) -> (B, H, R, D); prior (H or 1, >= S) by distance, -inf beyond the window.
    """
    R, S = q.shape[2], k.shape[2]
    out = torch.empty_like(q)
    step = max(1, STRIP_ELEMENTS // S)
    for begin in range(0, R, step):
        end = min(begin + step, R)
        first = 0 if window is None else max(0, S - R + begin - window)  # the block sees keys first ... last - 1
        last = S - R + end
        log_n = layout.log_n[0, 0, begin:end].flip(0) if attn.prior_has_row_scale else None
        strip = prior_strip(prior[:, : last - first], end - begin, log_n)[None]
        keys, values = k[:, :, first:last], v[:, :, first:last]
        y = F.scaled_dot_product_attention(q[:, :, begin:end].flip(2), keys, values, attn_mask=strip, scale=1.0)
        out[:, :, begin:end] = y.flip(2)
    return out


def log_priors(model: GPT, length: int, window: int | None) -> list[Tensor]:
    """For each layer the log-prior by distance, (H, length), or (1, length) where uniform; -inf beyond the window."""
    found = []
    for block in model.blocks:
        prior = block.attn.log_prior(length)
        prior = torch.zeros(1, length, device=model.embedding.weight.device) if prior is None else prior
        if window is not None:
            prior[:, window + 1 :] = -torch.inf
        found.append(prior)
    return found


def forward_chunk(
    model: GPT, idx: Tensor, cache: KVCache, priors: list[Tensor], wanted: int, window: int | None
) -> Tensor:
    """Run T more tokens (B, T) through all layers; returns the last block's last `wanted` outputs, (B, wanted, C)."""
    T = idx.shape[1]
    positions = torch.arange(cache.used, cache.used + T, device=idx.device)[None]
    x, layout = model.embed(idx, positions), model.layout(positions, window)
    for layer, block in enumerate(model.blocks):
        q, k, v = block.attn.project(block.norm_attn(x), layout)
        k, v = cache.append(layer, k, v)
        if layer == model.cfg.n_layer - 1:
            last = slice(T - wanted, None)
            x, q, layout = x[:, last], q[:, :, last], layout._replace(log_n=layout.log_n[:, :, last])
        x = x + block.attn.merge(attend(block.attn, q, k, v, priors[layer], layout, window))
        x = x + block.mlp(block.norm_mlp(x))
    cache.used += T
    return x


@torch.no_grad()
def prefill(model: GPT, idx: Tensor, cache: KVCache, wanted: int = 0, window: int | None = None) -> Tensor:
    """Append idx (B, T) to the cache; returns the logits of its last `wanted` positions, (B, wanted, V).

    window: hide the keys that are further away than this many tokens, as in `GPT.forward`.
    """
    B, T = idx.shape
    if cache.batch != B or cache.used + T > cache.length:
        raise ValueError(f"{B} x {cache.used} + {T} tokens do not fit a cache of {cache.batch} x {cache.length}")
    if not 0 <= wanted <= T:
        raise ValueError(f"wanted is {wanted}; it must be between 0 and the {T} tokens given")
    priors, step = log_priors(model, cache.used + T, window), max(1, CHUNK_TOKENS // B)
    outputs = []
    for begin in range(0, T, step):
        end = min(begin + step, T)
        rows = max(0, min(end - (T - wanted), end - begin))  # how many of the wanted positions are in this chunk
        outputs.append(forward_chunk(model, idx[:, begin:end], cache, priors, rows, window))
    return model.logits(torch.cat(outputs, dim=1))


@torch.no_grad()
def score(
    model: GPT, idx: Tensor, n_last: int, cache: KVCache | None = None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """How likely are the last n_last tokens of idx (B, T), each given the true ones before it?

    Returns their log-probabilities in nats and the most likely token at each of these places, both (B, n_last). With a
    cache, idx goes on where the cache ends (its first token cannot be scored); afterwards the cache holds all but the
    last token.
    """
    B, T = idx.shape
    if not 1 <= n_last < T:
        raise ValueError(f"n_last is {n_last}; it must be at least 1 and leave a token before it ({T} tokens given)")
    cache = cache or KVCache(model, B, T - 1)
    logits = prefill(model, idx[:, :-1], cache, wanted=n_last, window=window).float()
    log_p = logits.log_softmax(-1).gather(-1, idx[:, -n_last:, None]).squeeze(-1)
    return log_p, logits.argmax(-1)


@torch.no_grad()
def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    stop: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue idx (B, T) by up to max_new_tokens: (B, new). Greedy at temperature 0, otherwise sampled; ends when
    every row has produced the token `stop`."""
    cache = KVCache(model, idx.shape[0], idx.shape[1] + max_new_tokens)
    new, piece = [], idx
    for _ in range(max_new_tokens):
        logits = prefill(model, piece, cache, wanted=1)[:, 0].float()
        if temperature > 0:
            piece = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            piece = logits.argmax(-1, keepdim=True)
        new.append(piece)
        if stop is not None and (torch.cat(new, dim=1) == stop).any(dim=1).all():
            break
    return torch.cat(new, dim=1) if new else idx[:, :0]
