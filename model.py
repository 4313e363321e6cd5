"""Attention as a posterior over earlier tokens: what they say (likelihood) and where (prior).

A causal attention head returns for query i the expectation of the values of the keys j <= i,
out_i = sum_j p_ij v_j. If a score is a content plus a position term, c_ij + b_ij, then

    p_ij = softmax_j(c_ij + b_ij) = p_content(j | i) * p_prior(j | i) * Z_i            (Theorem 1)

    p_content = softmax_j c_ij                what the keys say: the likelihood, from q.k / sqrt(D)
    p_prior   = softmax_j b_ij                where the keys are: the prior, from their distances
    Z_i       = 1 / sum_j p_content p_prior   the normaliser of Bayes' rule

since e^(c + b) = e^c e^b. So an encoding that adds b is a choice of prior, to be judged by what it
says of distances never trained on. ln Z_i is 0 if both put everything on one key (the sum is at
most 1, so Z >= 1), ln n if one is uniform on the n keys, and unbounded if they contradict.

    pe          acts on     learned per head         b_ij, d = j - i <= 0      past training length
    nope        nothing     -                        0: uniform                attention fades
    sinusoidal  embeddings  -                        0: position is in c       unseen vectors: fails
    rope        q and k     -                        0: position is in c       unseen angles: fails
    alibi       scores      -                        -slope |d|: Laplace       local only
    ggd         scores      theta_alpha, theta_beta  -|(d - mu) / alpha|^beta  as the prior says

SSMax, on or off with each, multiplies c and b of a row by s ln n (ALiBi: c only), so that attention
does not fade as n grows. Theorem 1 then holds for what is really added.
Shapes: B batch, H heads, T query, S key, D head dim, C width, V vocabulary, R some of the queries.
Distances are in tokens, scores and log-priors in nats.

BAM     Bianchessi et al., "Bayesian Attention Mechanism", ICLR 2026 (arXiv 2505.22842)
SSMax   Nakanishi, "Scalable-Softmax Is Superior for Attention", 2025 (arXiv 2501.19399)
ALiBi   Press, Smith, Lewis, "Train Short, Test Long", ICLR 2022
RoPE    Su et al., "RoFormer", 2021; sinusoidal: Vaswani et al., "Attention Is All You Need", 2017
blocks  pre-RMSNorm (Zhang & Sennrich 2019) and SwiGLU (Shazeer 2020), as in Llama
"""

import math
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint as recompute

EPSILON = 1e-5  # keeps a power's base above 0; for beta < 0 it sets how silent the own token is
MAX_EXPONENT = 30.0  # a key e^30 nats down is silent; gradients and s ln n times it stay finite
ROPE_THETA = 500_000.0
LOSS_CHUNK = 2**26  # logits held at once by the loss: 256 MiB in float32
CPU_SCORES = 2**20  # scores at once on a CPU: 4 MiB stay near the cores
GPU_SCORES = 2**28  # scores at once elsewhere: 1 GiB


# Priors -------------------------------------------------------------------------------------------
# Each gives the log-prior b by distance: forward(n) -> (H, n) for the distances 0 ... n - 1.
# Lemma 1, NoPE: b = 0, so p_prior(j | i) = 1/n on the n keys that the causal mask leaves: uniform.


def alibi_slopes(n_head: int) -> Tensor:
    """ALiBi's slopes m, (H,): 2^(-8 h / H), h = 1 ... H, if H is a power of two. Otherwise those of
    the largest power of two p below H, then every other slope of 2p heads, from the first."""
    power = 2 ** int(math.log2(n_head))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    slopes += [2 ** (-4 * h / power) for h in range(1, 2 * power, 2)][: n_head - power]
    return torch.tensor(slopes)


class AlibiPrior(nn.Module):
    """ALiBi. Lemma 2: b = -m |d| is the log of a Laplace density of scale 1/m, cut to the visible
    keys. Lemma 3: its mass beyond a distance w is at most e^(-m (w + 1)) at every n. Content within
    +-c raises that by at most e^(2c), with SSMax (s c ln n) by n^(2sc): the reach grows as ln n. So
    ALiBi becomes local attention and cannot find a needle far away."""

    takes_ssmax = False  # as in the paper's baseline

    def __init__(self, cfg: "ModelConfig", layer: int = 0):
        super().__init__()
        self.register_buffer("slopes", alibi_slopes(cfg.n_head), persistent=False)

    def forward(self, n: int) -> Tensor:
        return -self.slopes[:, None] * torch.arange(n, device=self.slopes.device)


class GGDPrior(nn.Module):
    """Generalized Gaussian log-prior (BAM), in float64.

    The density is p(d) = beta / (2 alpha Gamma(1/beta)) * exp(-|(d - mu) / alpha|^beta). The factor
    before exp is the same for every key. Softmax cancels it, and with it the need for beta > 0:
    over finitely many keys any b can be normalised. With theta_beta = beta,
    alpha = exp(-theta_alpha / beta) if beta is not 0, and mu = exp(theta_mu) - exp(-theta_mu),
        b = -|(d - mu) / alpha|^beta = -e^theta_alpha |d - mu|^beta
    is left. It is computed as -e^x, x = theta_alpha + beta ln(|d - mu| + EPSILON): smooth in beta,
    and finite where d = mu and beta < 0. Above MAX_EXPONENT the tangent replaces e^x, so that
    farther keys stay less likely. mu < 0 puts the peak |mu| tokens back. For mu = 0:
        beta = 2      Gaussian
        beta = 1      Laplace: ALiBi with slope e^theta_alpha (but SSMax multiplies this b)
        0 < beta < 1  heavier tail: b falls without limit, but slower than any line
        beta = 0      b = -e^theta_alpha for every key: uniform, NoPE (where the paper starts)
        beta < 0      no density (the paper's relaxation): silences the own token, and others as far
                      as e^theta_alpha |d|^beta is large. Far keys are equal: retrieval anywhere
    SSMax (s > 0) makes alpha_eff = alpha (s ln n)^(-1/beta): as n grows a local head narrows and an
    anti-local one silences a wider zone. For twice s ln n alpha_eff is 2^(-1/beta) times as large:
    half for beta = 1, 1,024 times for beta = -0.1. At theta = 0 db/dtheta_beta is
    -ln(|d| + EPSILON), 11.5 at the own token, and db/dtheta_alpha -1 for all, which cancels.
    """

    takes_ssmax = True  # the whole log-posterior is sharpened

    def __init__(self, cfg: "ModelConfig", layer: int = 0):
        super().__init__()
        for name in ("alpha", "beta", "mu"):
            starts = getattr(cfg, f"theta_{name}")
            starts = starts * (cfg.n_layer * cfg.n_head // len(starts))
            value = torch.tensor(starts[layer * cfg.n_head :][: cfg.n_head], dtype=torch.float32)
            if name in cfg.theta_learned:
                setattr(self, f"theta_{name}", nn.Parameter(value))  # (H,)
            else:  # saved, but neither trained nor counted as a parameter
                self.register_buffer(f"theta_{name}", value)

    def forward(self, n: int) -> Tensor:
        theta_alpha = self.theta_alpha[:, None].double()  # (H, 1)
        theta_beta = self.theta_beta[:, None].double()
        mu = 2 * torch.sinh(self.theta_mu[:, None].double().clamp(-MAX_EXPONENT, MAX_EXPONENT))
        d = -torch.arange(n, device=mu.device, dtype=torch.float64)
        x = theta_alpha + theta_beta * torch.log((d - mu).abs() + EPSILON)  # (H, n)
        capped = x.clamp(max=MAX_EXPONENT)
        return -torch.exp(capped) * (1 + x - capped)


# A new prior is a class like these, with (H,) parameters named theta_..., and an entry here.
PRIORS = {"alibi": AlibiPrior, "ggd": GGDPrior}
ENCODINGS = ("nope", "sinusoidal", "rope", *PRIORS)


# Encodings without a prior ------------------------------------------------------------------------
# For any length. Angles in float64: in float32, 1,000,000 radians are wrong in the second decimal.


def angles(positions: Tensor, channels: int, base: float) -> Tensor:
    """(..., T) -> (..., T, channels / 2) radians, float64: position * base^(-2 i / channels)."""
    i = torch.arange(0, channels, 2, dtype=torch.float64, device=positions.device)
    return positions.double()[..., None] * base ** (-i / channels)


def sinusoidal_table(positions: Tensor, channels: int) -> Tensor:
    """(..., T) -> (..., T, C) float32: sines, then cosines, over sqrt(C): the embeddings' size at
    the start. (Vaswani et al. multiply the embeddings instead. Here they are those of every pe.)"""
    angle = angles(positions, channels, 10_000.0)
    return torch.cat((angle.sin(), angle.cos()), dim=-1).float() / math.sqrt(channels)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: x (B, H, T, D) and cos, sin (B, 1, T, D/2). The channels i and i + D/2 are a complex
    number. Rotated by the angle w t, q at t and k at u meet as
        Re(q e^{iwt} conj(k e^{iwu})) = Re(q conj(k) e^{iw(t - u)}):  only t - u counts."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


# SSMax --------------------------------------------------------------------------------------------
# Plain softmax fades: a key whose score is g above n - 1 equal others has the weight
# e^g / (e^g + n - 1), which goes to 0 as n grows. Scalable-Softmax takes n as the base,
# n^(s z_j) / sum_k n^(s z_k) = softmax_j(s ln n z_j): the same key has n^(sg) / (n^(sg) + n - 1),
# above 1/2 at every n as soon as s > 0 and g > 1/s. Each head learns its s; n is the number of keys
# that this query sees. A negative s flips whatever it multiplies.
#
# A virtual length (not in the paper). Past the training length s ln n is larger than ever before:
# local heads narrow, wide ones turn steep. So training can take e^u n for n, u drawn for a window
# from 0 ... ln(virtual_length): s (ln n + u) is the sharpness of a text e^u times as long. Local
# heads then learn a shape that holds at every sharpness, and far-looking heads become flat: a slope
# harmless at one sharpness hides far keys at another. Nearest relative: randomized positional
# encodings (Ruoss et al. 2023), which draw positions.


@dataclass
class ModelConfig:
    """The model's shape and its positional encoding. ValueError if it makes no sense."""

    vocab_size: int = 50257  # number of token ids that exist: 50257 for gpt2, 257 for bytes
    vocab_multiple: int = 64  # the embedding has a multiple of it rows; padding is never predicted
    n_layer: int = 12  # number of blocks
    n_head: int = 16  # attention heads per block
    n_embd: int = 768  # width C
    ffn_mult: float = 2.0  # hidden width of the SwiGLU MLP, in units of n_embd
    block_size: int = 512  # training length in tokens: recorded, never a limit
    pe: Literal[ENCODINGS] = "ggd"  # positional encoding
    ssmax: bool = True  # Scalable-Softmax: sharpen the scores of a query that sees n keys by s ln n
    ssmax_init: float = 1.0  # s at the start: 1 (paper), or 1 / ln(block_size) for plain sharpness
    ssmax_scales: Literal["posterior", "content"] = "posterior"  # ggd: what s ln n multiplies,
    # content and prior together (the paper), or the content alone, as it does for alibi
    virtual_length: float = 1.0  # training draws an n for SSMax up to this many times the real one
    theta_alpha: tuple[float, ...] = (0.0,)  # ggd: theta_alpha at the start: one value, one a head
    # of a layer, or one a head of all layers, the first layer's first
    theta_beta: tuple[float, ...] = (0.0,)  # ggd: theta_beta, likewise (0 and 0: the uniform prior)
    theta_mu: tuple[float, ...] = (0.0,)  # ggd: theta_mu, likewise (0: centred on the query)
    theta_learned: tuple[str, ...] = ("alpha", "beta")  # ggd: which of alpha, beta, mu are trained
    theta_beta_min: float = -1e9  # ggd: least theta_beta in training; 0: no anti-local heads
    tie_embeddings: bool = True  # the output layer shares the embedding's matrix

    def __post_init__(self):
        for name in ("vocab_size", "vocab_multiple", "n_layer", "n_head", "n_embd", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.pe not in ENCODINGS:
            raise ValueError(f"pe is {self.pe}; it must be one of {', '.join(ENCODINGS)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")
        if {"rope": self.head_dim, "sinusoidal": self.n_embd}.get(self.pe, 0) % 2:
            raise ValueError(f"pe {self.pe} works on pairs of channels; double n_embd")
        if self.virtual_length < 1 or self.virtual_length > 1 and not self.ssmax:
            raise ValueError(f"virtual_length is {self.virtual_length}; take 1, or more with ssmax")
        heads, both = self.n_head, self.n_layer * self.n_head
        for name in ("theta_alpha", "theta_beta", "theta_mu"):
            if (got := len(getattr(self, name))) not in (1, heads, both):
                raise ValueError(f"{name} has {got} values; give 1, {heads} or {both}")
        if unknown := set(self.theta_learned) - {"alpha", "beta", "mu"}:
            raise ValueError(f"theta_learned names {min(unknown)}; it may hold alpha, beta and mu")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


# The rows of a batch ------------------------------------------------------------------------------


class Layout(NamedTuple):
    """What every layer needs to know about the rows."""

    n: Tensor  # (B or 1, T) int64: the number of keys that the query can see, itself included
    log_n: Tensor  # (B or 1, 1, T, 1) float32: ln n, plus u in training with a virtual length
    rotation: tuple[Tensor, Tensor] | None  # RoPE's cos and sin, (B or 1, 1, T, D/2)
    attention: str = "reference"  # which of ATTENTIONS computes it
    blocks: BlockMask | None = None  # for "fused": which keys a query sees


def documents(idx: Tensor, eot: int) -> Tensor:
    """(B, T) -> (B, T): the number of each token's document, which begins with end-of-text."""
    return (idx == eot).cumsum(1)


def visible(n: Tensor, distance: Tensor) -> Tensor:
    """Additive mask (B or 1, 1, R, S) from i - j (R, S): a query sees the last n (B or 1, R) keys.
    -inf, since any finite "very negative" number is beaten by some legal score."""
    seen = (distance >= 0) & (distance < n[:, :, None])
    return torch.zeros(seen.shape, device=n.device).masked_fill_(~seen, -math.inf)[:, None]


def visible_blocks(T: int, doc_ids: Tensor | None, window: int | None, device) -> BlockMask:
    """The same for `fused_attention`: the blocks of scores to compute, and the keys inside them."""

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ok = i >= j if window is None else (i >= j) & (i - j <= window)
        return ok if doc_ids is None else ok & (doc_ids[b, i] == doc_ids[b, j])

    batch = None if doc_ids is None else len(doc_ids)
    return create_block_mask(seen, batch, None, T, T, device=device)


# Attention ----------------------------------------------------------------------------------------
# An attention takes q, k, v (B, H, T, D), where q.k is the scaled content; log_prior (H, T) by
# distance, or None; row_scale (B or 1, 1, T, 1), which multiplies it. It returns the posterior
# expectation of the values, like q.


def toeplitz(vector: Tensor, rows: int) -> Tensor:
    """(H, T) by distance -> (H, rows, T), the last rows of the T x T matrix vector[i - j]; 0, for
    the mask to hide, where j > i. All rows are windows of one padded, reversed vector."""
    return F.pad(vector.flip(-1), (0, rows - 1)).unfold(-1, vector.shape[-1], 1).flip(-2)


def log_posterior(scores: Tensor, prior: Tensor | None, row_scale: Tensor, mask: Tensor) -> Tensor:
    """Content scores (B, H, R, S) + log-prior (H, R, S) * row_scale: ln posterior + a constant.
    The mask comes last: no factor can then turn its -inf into NaN or a finite number."""
    return (scores if prior is None else torch.addcmul(scores, prior, row_scale)) + mask


def reference_attention(q, k, v, log_prior, row_scale, layout: Layout) -> Tensor:
    """The definition: explicit scores, softmax in float32. Blocks of queries, with the keys up to
    the block's end, keep the scores in fast memory."""
    B, H, T, _ = q.shape
    rows = max(1, (CPU_SCORES if q.device.type == "cpu" else GPU_SCORES) // (B * H * T))
    places, out = torch.arange(T, device=q.device), []
    with torch.autocast(q.device.type, enabled=False):
        for begin in range(0, T, rows):
            end = min(T, begin + rows)
            scores = q[:, :, begin:end].float() @ k[:, :, :end].float().transpose(-2, -1)
            prior = None if log_prior is None else toeplitz(log_prior[:, :end], end - begin)
            distance = places[begin:end, None] - places[:end]
            mask = visible(layout.n[:, begin:end], distance)
            scores = log_posterior(scores, prior, row_scale[:, :, begin:end], mask)
            out.append(scores.softmax(-1) @ v[:, :, :end].float())
        return torch.cat(out, dim=2).to(v.dtype)


compiled_flex_attention = torch.compile(flex_attention, dynamic=False)  # when it is first called


def fused_attention(q, k, v, log_prior, row_scale, layout: Layout) -> Tensor:
    """The same as one kernel (FlexAttention), for training on CUDA: blocks of q.k in float32, each
    score through `add_prior`, a running softmax. A learnable tensor may be read only once in there,
    and its gradient is an atomic sum over all scores that share an entry. So it reads the vector of
    H x T entries, not H scalars.

    A kernel's gradient at a weight of 1 is rounding noise where the explicit softmax's is 0, and
    db/dtheta is as large as b: huge at the own token for beta < 0. There b is clamped so far from
    its neighbour's that it still silences the token (s < 0: all others). A clamped value has no
    gradient, as it should. Nor can a running softmax tell large scores apart, so each row's largest
    visible prior is subtracted."""
    if log_prior is not None:
        own, neighbour = log_prior[:, :1], log_prior[:, :2].detach()[:, -1:]  # T = 1: itself
        far = 1e4 + neighbour.abs()  # nats: enough whatever the content says
        own = own.clamp(neighbour - far, neighbour + far)
        log_prior = torch.cat((own, log_prior[:, 1:]), dim=1)
        top = log_prior.detach().cummax(1).values[:, layout.n.expand(len(q), -1) - 1]  # (H, B, T)
    row_scale = row_scale.expand(len(q), -1, -1, -1).flatten(1)  # (B, T)

    def add_prior(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if log_prior is None:
            return score
        # abs: some scores above the diagonal are computed, for the mask to hide
        return score + (log_prior[h, (i - j).abs()] - top[h, b, i]) * row_scale[b, i]

    return compiled_flex_attention(q, k, v, add_prior, layout.blocks, scale=1.0)


ATTENTIONS = {"reference": reference_attention, "fused": fused_attention}


class Posterior(NamedTuple):
    """Theorem 1, row by row: posterior = prior * content * exp(log_z)."""

    prior: Tensor  # (B, H, R, S), as the next two
    content: Tensor
    posterior: Tensor
    log_z: Tensor  # (B, H, R)


def reference_posterior(scores: Tensor, prior, row_scale: Tensor, mask: Tensor) -> Posterior:
    content = (scores + mask).log_softmax(-1)
    alone = log_posterior(torch.zeros_like(scores), prior, row_scale, mask).log_softmax(-1)
    posterior = log_posterior(scores, prior, row_scale, mask).softmax(-1)
    log_z = -torch.logsumexp(content + alone, dim=-1)  # the product itself may underflow
    return Posterior(alone.exp(), content.exp(), posterior, log_z)


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int = 0):
        super().__init__()
        self.cfg = cfg
        self.qkv = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=False)
        self.out = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        if cfg.ssmax:
            self.s = nn.Parameter(torch.full((cfg.n_head,), float(cfg.ssmax_init)))
        self.prior = PRIORS[cfg.pe](cfg, layer) if cfg.pe in PRIORS else None
        takes_ssmax = getattr(self.prior, "takes_ssmax", False)
        self.scales_prior = takes_ssmax and cfg.ssmax and cfg.ssmax_scales == "posterior"

    def ssmax(self, log_n: Tensor) -> tuple[Tensor | float, Tensor]:
        """What multiplies each row, from ln n (B or 1, 1, T, 1): the content by s ln n, (.., H, T,
        1), and what `log_prior` returns by ln n, since s is in it. 1 where SSMax does not act."""
        content = log_n * self.s[:, None, None] if self.cfg.ssmax else 1.0
        return content, log_n if self.scales_prior else torch.ones_like(log_n)

    def log_prior(self, n: int) -> Tensor | None:
        """b or s b at the distances 0 ... n - 1, (H, n) float32; None: uniform. The largest b is
        subtracted, which no softmax sees: float32 cannot hold small differences of large b."""
        if self.prior is None:
            return None
        b = self.prior(n)
        b = b - b.amax(-1, keepdim=True)
        return (self.s[:, None] * b if self.scales_prior else b).float()

    def project(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, C) -> q, k, v (B, H, T, D): rotated for RoPE; q times 1/sqrt(D) and SSMax."""
        qkv = self.qkv(x).unflatten(-1, (3, self.cfg.n_head, self.cfg.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if layout.rotation is not None:
            q, k = rotate(q, *layout.rotation), rotate(k, *layout.rotation)
        scale, _ = self.ssmax(layout.log_n)
        return (q * (scale / math.sqrt(self.cfg.head_dim))).to(v.dtype), k, v

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        q, k, v = self.project(x, layout)
        _, row_scale = self.ssmax(layout.log_n)
        y = ATTENTIONS[layout.attention](q, k, v, self.log_prior(x.shape[1]), row_scale, layout)
        return self.out(y.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, C)

    def posterior(self, q: Tensor, k: Tensor, layout: Layout, rows: Tensor) -> Posterior:
        """Theorem 1 for the queries at the places `rows` (R,), from what `project` gave; in q's
        number format. float64 shows posterior = prior * content * Z beside any log-prior."""
        distance = rows[:, None] - torch.arange(k.shape[2], device=k.device)
        content = q[:, :, rows] @ k.transpose(-2, -1)
        prior, (_, row_scale) = self.log_prior(k.shape[2]), self.ssmax(layout.log_n[:, :, rows])
        if prior is not None:
            prior = prior.to(q.dtype)[:, distance.clamp(min=0)]
        mask = visible(layout.n[:, rows], distance)
        return reference_posterior(content, prior, row_scale.to(q.dtype), mask)


# The Transformer ----------------------------------------------------------------------------------


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        hidden = int(cfg.ffn_mult * cfg.n_embd)
        self.gate_up = nn.Linear(cfg.n_embd, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, cfg.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.norm_attn = nn.RMSNorm(cfg.n_embd, eps=1e-5)
        self.attn = CausalSelfAttention(cfg, layer)
        self.norm_mlp = nn.RMSNorm(cfg.n_embd, eps=1e-5)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        x = x + self.attn(self.norm_attn(x), layout)
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.attention = "reference"  # which of ATTENTIONS trains it; in eval mode: the reference
        self.window: int | None = None  # hide keys further away; with RoPE the paper's Local RoPE
        self.embedding = nn.Embedding(cfg.padded_vocab, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layer))
        self.norm = nn.RMSNorm(cfg.n_embd, eps=1e-5)
        self.head = nn.Linear(cfg.n_embd, cfg.padded_vocab, bias=False)
        if cfg.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal weights of mean 0 and this std; norms are 1, s and theta as the config says.

        embedding, v, gate_up, head  n_embd ** -0.5: a unit-RMS input gives v and logits of RMS 1
        q, k                         (3 n_embd) ** -0.5: PyTorch's default, as in the paper: scores
                                     of RMS 1/3. At 1 a query would begin with very few keys
        out, down                    (2 n_layer n_embd) ** -0.5: 2 n_layer branches add up
        """
        std = self.cfg.n_embd**-0.5
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
                p.normal_(0.0, std / math.sqrt(2 * self.cfg.n_layer) if residual else std)
            if name.endswith("qkv.weight"):
                p[: 2 * self.cfg.n_embd] /= math.sqrt(3)

    def embed(self, idx: Tensor, positions: Tensor) -> Tensor:
        """Token ids (B, T) and their positions (B or 1, T) -> (B, T, C)."""
        x = self.embedding(idx)
        sinusoidal = self.cfg.pe == "sinusoidal"
        return x + sinusoidal_table(positions, self.cfg.n_embd) if sinusoidal else x

    def layout(self, positions: Tensor, log_virtual: Tensor | None = None) -> Layout:
        """For queries at `positions` (B or 1, T), counted inside their document."""
        n, rotation = positions + 1, None
        if self.window is not None:
            n = n.clamp(max=self.window + 1)
        if self.cfg.pe == "rope":
            angle = angles(positions, self.cfg.head_dim, ROPE_THETA)[:, None]
            rotation = angle.cos().float(), angle.sin().float()
        log_n = n.float().log()
        if log_virtual is not None:
            log_n = log_n + log_virtual[:, None]
        return Layout(n, log_n[:, None, :, None], rotation)

    def logits(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., V): final norm and output layer, without the vocabulary's padding."""
        return self.head(self.norm(x))[..., : self.cfg.vocab_size]

    def forward(self, idx: Tensor, targets=None, doc_ids=None, log_virtual=None) -> Tensor:
        """Logits (B, T, V) for idx (B, T), or with targets (B, T; -100 is not counted) the mean
        cross entropy in nats.

        doc_ids (B, T) from `documents` grow along a row. Attention, distances, n and positions stay
        inside a document, so packed documents equal separate ones, for every encoding. (The authors
        count the sinusoidal's positions over the window.) log_virtual (B,) is added to ln n.
        """
        T = idx.shape[1]
        positions = torch.arange(T, device=idx.device)[None]
        if doc_ids is not None:  # minus the place where the document's id stands first
            positions = positions - torch.searchsorted(doc_ids, doc_ids)
        how = self.attention if self.training else "reference"
        blocks = visible_blocks(T, doc_ids, self.window, idx.device) if how == "fused" else None
        layout = self.layout(positions, log_virtual)._replace(attention=how, blocks=blocks)
        x = self.embed(idx, positions)
        for block in self.blocks:
            x = block(x, layout)
        return self.logits(x) if targets is None else self.loss(x, targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy. Chunks keep no logits: the backward computes them again."""

        def total(x: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.logits(x).float(), targets, reduction="sum")

        x, targets = x.flatten(0, 1), targets.flatten()
        rows = max(1, LOSS_CHUNK // self.cfg.padded_vocab)
        if len(x) <= rows:
            return total(x, targets) / (targets != -100).sum()
        losses = [
            recompute(total, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(x.split(rows), targets.split(rows), strict=True)
        ]
        return torch.stack(losses).sum() / (targets != -100).sum()

    @torch.no_grad()
    def constrain(self) -> None:
        """Put theta_beta back to its least value after a step. Clamped inside the prior it would
        get no gradient there, and never come back."""
        if self.cfg.pe == "ggd":
            for block in self.blocks:
                block.attn.prior.theta_beta.clamp_(min=self.cfg.theta_beta_min)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Every parameter exactly once, by name: matrices, norms, theta (the prior), s (SSMax)."""
        groups = {"matrix": [], "norm": [], "theta": [], "s": []}
        for name, p in self.named_parameters():
            kind = {"theta_": "theta", "s": "s"}.get(name.split(".")[-1][:6])
            groups[kind or ("norm" if "norm" in name else "matrix")].append(p)
        return groups

    def optimizer_groups(self, lr: float, prior_lr: float, ssmax_lr: float, weight_decay: float):
        """For a torch optimizer. Only matrices decay; theta and s have their own rates."""
        rates, decay = {"theta": prior_lr, "s": ssmax_lr}, {"matrix": weight_decay}
        return [
            {"name": k, "params": p, "lr": rates.get(k, lr), "weight_decay": decay.get(k, 0.0)}
            for k, p in self.parameter_groups().items()
            if p
        ]

    def flops_per_token(self, T: int) -> int:
        """Operations of training on one token in a window of T, without recomputation. Each weight
        multiplies and adds once in the forward pass and twice in the backward. So do q.k and p.v
        for the (T + 1) / 2 keys that a query sees on average. Embeddings are looked up."""
        weights = sum(p.numel() for p in self.parameter_groups()["matrix"])
        weights -= 0 if self.cfg.tie_embeddings else self.embedding.weight.numel()
        return 6 * weights + 6 * self.cfg.n_layer * self.cfg.n_embd * (T + 1)

    def head_values(self) -> dict[str, list[Tensor]]:
        """The prior's theta_... and s, learned or fixed: name -> the (H,) tensor of each layer."""
        values = {}
        for block in self.blocks:
            for path, tensor in sorted(block.attn.state_dict().items()):
                if tensor.dim() == 1:
                    values.setdefault(path.removeprefix("prior."), []).append(tensor)
        return values

    def prior_values(self) -> dict[str, list[list[float]]]:
        """The same as numbers, for logs and tables."""
        return {name: [t.tolist() for t in layers] for name, layers in self.head_values().items()}

    def checkpoint(self) -> dict:
        """What `runs.load_model` needs to build this model again; tensors and plain values only."""
        return {"model": self.state_dict(), "model_config": asdict(self.cfg)}
