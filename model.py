"""Attention as a posterior over earlier tokens: what they say (likelihood) times where they are (prior).

A causal attention head looks from query i at the keys j <= i and returns an expectation of their values,
out_i = sum_j p_ij v_j. If the score is a sum of a content and a position term, score_ij = c_ij + b_ij, then

    p_ij = softmax_j(c_ij + b_ij) = p_content(j | i) * p_prior(j | i) * Z_i            (Theorem 1)

    p_content = softmax_j c_ij                what the keys say: the likelihood, from q.k / sqrt(D)
    p_prior   = softmax_j b_ij                where the keys are: the prior, from their distances
    Z_i       = 1 / sum_j p_content p_prior   the normaliser of Bayes' rule

because softmax(c + b) is proportional to e^c e^b, and each factor differs from its own softmax by a constant per row.
A positional encoding that adds b is thus a choice of prior, to be judged by what it says of distances never trained
on. ln Z_i is the coupling of the two: 0 if both put everything on the same key (the sum is at most 1, so Z >= 1), ln n
if one of them is uniform on the n keys, and without bound the more they contradict each other.

    pe          where it acts            learned per head         b_ij with d = j - i <= 0     past the training length
    nope        nowhere                  -                        0: uniform on visible keys   attention fades
    sinusoidal  added to the embeddings  -                        0: position is in c          unseen vectors: fails
    rope        rotates q and k          -                        0: position is in c          unseen angles: fails
    alibi       added to the scores      -                        -slope |d|: Laplace prior    local only
    ggd         added to the scores      theta_alpha, theta_beta  -|(d - mu) / alpha|^beta     as the prior says

SSMax is orthogonal to all five: c and b of a row are multiplied by s ln n (ALiBi: c only), so attention does not fade
as n grows. Theorem 1 holds for what is really added: content s ln n q.k / sqrt(D) and prior s ln n b.
Shapes: B batch, H heads, T query, S key, D head dim, C width, V vocabulary. Units: tokens; nats for scores and priors.

References
    BAM      Bianchessi, Aguirre, Barros, Kupssinskü, "Bayesian Attention Mechanism", ICLR 2026 (arXiv 2505.22842)
    SSMax    Nakanishi, "Scalable-Softmax Is Superior for Attention", 2025 (arXiv 2501.19399)
    ALiBi    Press, Smith, Lewis, "Train Short, Test Long", ICLR 2022
    RoPE     Su et al., "RoFormer", 2021;  sinusoidal: Vaswani et al., "Attention Is All You Need", 2017
    blocks   pre-RMSNorm (Zhang & Sennrich 2019) and SwiGLU (Shazeer 2020), as in Llama
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

EPSILON = (
    1e-5  # keeps the base of the power above 0; for beta < 0 it sets how silent the own token is
)
DECISIVE = 1e4  # nats that silence a key, or all others, whatever the content says
MAX_EXPONENT = 30.0  # a key e^30 nats down is silent; gradients, their norm and the product with s ln n stay finite
ROPE_THETA = 500_000.0
LOSS_CHUNK = 2**26  # logits held at once by the loss: 256 MiB in float32
CPU_SCORES = 2**20  # scores at once on a CPU: 4 MiB stay near the cores
GPU_SCORES = 2**28  # scores at once elsewhere: 1 GiB


@dataclass
class ModelConfig:
    """The shape of the model and its positional encoding. Raises ValueError, in one sentence, if it makes no sense."""

    vocab_size: int = 50257  # number of token ids that exist: 50257 for gpt2, 257 for bytes
    vocab_multiple: int = (
        64  # the embedding's rows are rounded up to a multiple of it; padding is never predicted
    )
    n_layer: int = 12  # number of blocks
    n_head: int = 16  # attention heads per block
    n_embd: int = 768  # width C
    ffn_mult: float = 2.0  # hidden width of the SwiGLU MLP, in units of n_embd
    block_size: int = 512  # training length in tokens: recorded, never a limit
    pe: Literal["nope", "sinusoidal", "rope", "alibi", "ggd"] = "ggd"  # positional encoding
    ssmax: bool = True  # Scalable-Softmax: sharpen the scores of a query that sees n keys by s ln n
    ssmax_init: float = (
        1.0  # s at the start; 1 (the paper) is ln n times sharper than plain softmax,
    )
    # 1 / ln(block_size) about as sharp
    ssmax_scales: Literal["posterior", "content"] = (
        "posterior"  # ggd: s ln n sharpens content and prior together (the
    )
    # paper), or the content alone, as it does for alibi
    virtual_length: float = (
        1.0  # training takes the n of SSMax as up to this many times larger, drawn for each window
    )
    # (not in the paper); 1: as it is
    theta_alpha: tuple[float, ...] = (
        0.0,
    )  # ggd: theta_alpha at the start: one value, or one per head of a layer, or
    # one per head of all layers, the first layer's first
    theta_beta: tuple[float, ...] = (
        0.0,
    )  # ggd: theta_beta at the start (0 and 0 is the uniform prior), likewise
    theta_mu: tuple[float, ...] = (
        0.0,
    )  # ggd: theta_mu at the start (0: centred on the query), likewise
    theta_learned: tuple[str, ...] = (
        "alpha",
        "beta",
    )  # ggd: which of alpha, beta, mu are trained; others stay fixed
    theta_beta_min: float = (
        -1e9
    )  # ggd: training keeps theta_beta at or above it; 0: no anti-local heads
    tie_embeddings: bool = True  # the output layer shares the embedding's matrix

    def __post_init__(self):
        for name in ("vocab_size", "vocab_multiple", "n_layer", "n_head", "n_embd", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.pe not in ("nope", "sinusoidal", "rope", "alibi", "ggd"):
            raise ValueError(f"pe is {self.pe}; it must be nope, sinusoidal, rope, alibi or ggd")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}; change one of them"
            )
        if self.pe == "rope" and self.head_dim % 2 or self.pe == "sinusoidal" and self.n_embd % 2:
            raise ValueError(
                f"pe {self.pe} works on pairs of channels; n_embd {self.n_embd} gives it an odd number"
            )
        if self.virtual_length < 1 or (self.virtual_length > 1 and not self.ssmax):
            raise ValueError(
                f"virtual_length is {self.virtual_length:g}; it must be 1, or with ssmax more"
            )
        if self.hidden < 1:
            raise ValueError(
                f"ffn_mult is {self.ffn_mult}; it must be positive and leave at least one hidden unit"
            )
        for name in ("theta_alpha", "theta_beta", "theta_mu"):
            if (got := len(getattr(self, name))) not in (
                1,
                self.n_head,
                self.n_layer * self.n_head,
            ):
                some, every = self.n_head, self.n_layer * self.n_head
                raise ValueError(
                    f"{name} has {got} values; give 1, {some} (one per head) or {every} (and layer)"
                )
        if unknown := set(self.theta_learned) - {"alpha", "beta", "mu"}:
            raise ValueError(
                f"theta_learned names {', '.join(sorted(unknown))}; it may hold alpha, beta and mu"
            )

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def hidden(self) -> int:
        return int(self.ffn_mult * self.n_embd)

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


# ---------------------------------------------------------------------------------------------------------------------
# Priors. Each gives the log-prior by distance, a vector of n values per head for the distances 0 ... n - 1.
# Lemma 1, NoPE: b = 0, so p_prior(j | i) = 1/n over the n keys that the causal mask leaves. The uniform prior.


def alibi_slopes(n_head: int) -> Tensor:
    """The slopes m of ALiBi (Press et al. 2022), (H,): 2^(-8 h / H) for h = 1 ... H if H is a power of two; otherwise
    those of the largest power of two p below H, then every other slope of 2p heads, from the first.

    Lemma 2: b = -m |d|, so p_prior is proportional to exp(-|d| / (1/m)): a Laplace density of scale 1/m, cut to the
    visible keys. Lemma 3: its mass beyond a distance w is at most e^(-m (w + 1)), whatever n; content scores within
    +-c raise that by at most e^(2c), or with SSMax, where c becomes s c ln n, by n^(2sc): the reach then grows as ln n.
    So ALiBi becomes local attention, and cannot find a needle far away."""
    power = 2 ** int(math.log2(n_head))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    slopes += [2 ** (-4 * h / power) for h in range(1, 2 * power, 2)][: n_head - power]
    return torch.tensor(slopes)


class GGDPrior(nn.Module):
    """Generalized Gaussian log-prior (BAM). forward(n) -> (H, n): b at the distances 0 ... n - 1, float64.

    The generalized Gaussian's density is p(d) = beta / (2 alpha Gamma(1/beta)) * exp(-|(d - mu) / alpha|^beta). The
    factor before exp is the same for every key of a row, so softmax cancels it, and with it the need for beta > 0:
    over finitely many keys any b can be normalised. With theta_beta = beta, alpha = exp(-theta_alpha / theta_beta)
    where beta is not 0, and mu = exp(theta_mu) - exp(-theta_mu), the log-prior that is left is
        b = -|(d - mu) / alpha|^beta = -e^theta_alpha |d - mu|^beta,
    computed as -e^x with x = theta_alpha + beta ln(|d - mu| + EPSILON): smooth in theta_beta, and finite where d = mu
    and beta < 0. Above MAX_EXPONENT its tangent takes the place of e^x, so that farther keys still are less likely.
    mu < 0 puts the peak |mu| tokens back. For mu = 0:
        beta = 2      Gaussian
        beta = 1      Laplace: ALiBi with slope e^theta_alpha (ALiBi with SSMax differs: its bias is not scaled)
        0 < beta < 1  heavier tail: b still falls without limit, but slower than any line
        beta = 0      b = -e^theta_alpha for every key, so uniform: NoPE (where the paper's training starts)
        beta < 0      no density (the paper's relaxation): the own token is silenced, other keys as far as
                      e^theta_alpha |d|^beta is large, and b -> 0 far away: all far keys are equal, retrieval anywhere
    A trained head is called local for beta > 0, retrieval for -0.6 <= beta <= 0, aggressive for beta < -0.6.
    SSMax (s > 0) gives alpha_eff = alpha (s ln n)^(-1/beta). As n grows a local head narrows and an anti-local head
    widens the zone that it silences: slowly for |beta| of 1 and more, without limit near 0. When s ln n doubles,
    alpha_eff changes by 2^(-1/beta): half for beta = 1, 1,024 times for beta = -0.1.
    Gradients at theta = 0: db/dtheta_beta = -ln(|d| + EPSILON), which is 11.5 at the own token; db/dtheta_alpha = -1
    for every key, which softmax cancels to 0. Counts: 2 scalars x 16 heads x 12 layers = 384 in the 120M model.
    """

    def __init__(self, cfg: ModelConfig, layer: int = 0):
        super().__init__()
        for name in ("alpha", "beta", "mu"):
            start = getattr(cfg, f"theta_{name}")
            starts = start * (cfg.n_layer * cfg.n_head // len(start))
            value = torch.tensor(
                starts[layer * cfg.n_head :][: cfg.n_head], dtype=torch.float32
            )  # (H,)
            if name in cfg.theta_learned:
                setattr(self, f"theta_{name}", nn.Parameter(value))
            else:  # a buffer is saved with the model, but it is no parameter: no gradient, and counts are right
                self.register_buffer(f"theta_{name}", value)

    def forward(self, n: int) -> Tensor:
        theta_alpha, theta_beta = (
            self.theta_alpha[:, None].double(),
            self.theta_beta[:, None].double(),
        )  # (H, 1)
        mu = 2 * torch.sinh(self.theta_mu[:, None].double().clamp(-MAX_EXPONENT, MAX_EXPONENT))
        d = -torch.arange(n, device=mu.device, dtype=torch.float64)
        x = theta_alpha + theta_beta * torch.log((d - mu).abs() + EPSILON)  # (H, n)
        capped = x.clamp(max=MAX_EXPONENT)
        return -torch.exp(capped) * (1 + x - capped)


# ---------------------------------------------------------------------------------------------------------------------
# Encodings that act elsewhere: on the embeddings (sinusoidal), or on q and k (RoPE). Any length; angles in float64,
# because a float32 angle of 1,000,000 radians is wrong in its second decimal.


def angles(positions: Tensor, channels: int, base: float) -> Tensor:
    """(..., T) positions -> (..., T, channels / 2) angles in radians, float64: position * base^(-2 i / channels)."""
    i = torch.arange(0, channels, 2, dtype=torch.float64, device=positions.device)
    return positions.double()[..., None] * base ** (-i / channels)


def sinusoidal_table(positions: Tensor, channels: int) -> Tensor:
    """(..., T) -> (..., T, C) float32: sines, then cosines, over sqrt(C), as large as the embeddings at the start.
    Vaswani et al. (2017) get the same ratio by multiplying the embeddings by sqrt(C); here they keep one size for
    every encoding, so that nothing else differs between two runs."""
    angle = angles(positions, channels, 10_000.0)
    return torch.cat((angle.sin(), angle.cos()), dim=-1).float() / math.sqrt(channels)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: x (B, H, T, D) and cos, sin (B, 1, T, D/2); channel i is paired with channel i + D/2.

    Each pair is a complex number; rotating it by the angle w t makes q at t and k at u meet as
        Re(q e^{iwt} conj(k e^{iwu})) = Re(q conj(k) e^{iw(t - u)}):  the score depends on the distance t - u only.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# SSMax. Plain softmax fades: a key whose score is g above n - 1 equal others has the weight e^g / (e^g + n - 1), which
# goes to 0 as n grows. Scalable-Softmax takes n as the base, n^(s z_j) / sum_k n^(s z_k) = softmax_j(s ln n z_j): the
# same key has the weight n^(sg) / (n^(sg) + n - 1), above 1/2 at every n as soon as s > 0 and g > 1/s. s: one scalar
# per head, learned; n: the keys this query can see. s ln n multiplies content and GGD prior together (the whole
# log-posterior is sharpened); for ALiBi the content only, as in the paper's baseline. A negative s flips both.
#
# A virtual length (not in the paper). Past the training length s ln n is larger than training has ever seen: local
# heads narrow, wide ones turn steep, and what they tell the next layer changes. So training can take n as e^u times
# what it is, with u uniform in 0 ... ln(virtual_length), one draw for a window: s ln n becomes s (ln n + u), the
# sharpness of a text e^u times as long. Local heads then learn a shape that holds at every sharpness, and far-looking
# heads become flat, since a slope that is harmless at one sharpness hides far keys at another. Nearest relative:
# randomized positional encodings (Ruoss et al. 2023), which draw positions where this draws a length.


class Layout(NamedTuple):
    """What every layer needs to know about the rows of a batch; computed once per forward."""

    n: Tensor  # (B or 1, T) int64: the number of keys that the query can see, itself included
    log_n: Tensor  # (B or 1, 1, T, 1) float32: its logarithm
    rotation: tuple[Tensor, Tensor] | None  # RoPE's cos and sin, (B, 1, T, D/2)
    mask: (
        Tensor | BlockMask | None
    )  # which keys a query sees: from `visible`, for fused from `visible_blocks`


def documents(idx: Tensor, eot: int) -> Tensor:
    """(B, T) -> (B, T): the number of each token's document; a document begins with its end-of-text token."""
    return (idx == eot).cumsum(1)


def positions_in_documents(doc_ids: Tensor) -> Tensor:
    """(B, T) ids that grow where a document begins -> (B, T) position of each token inside its document, from 0."""
    index = torch.arange(doc_ids.shape[1], device=doc_ids.device).expand_as(doc_ids)
    begins = F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0), value=True)
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def visible(T: int, doc_ids: Tensor | None, window: int | None, device: torch.device) -> Tensor:
    """Additive mask (B or 1, 1, T, T). -inf, since any finite "very negative" number is beaten by some legal score."""
    distance = torch.arange(T, device=device)[:, None] - torch.arange(T, device=device)  # i - j
    seen = (
        (distance >= 0)[None] if window is None else ((distance >= 0) & (distance <= window))[None]
    )
    if doc_ids is not None:
        seen = seen & (doc_ids[:, :, None] == doc_ids[:, None, :])
    return torch.zeros(seen.shape, device=device).masked_fill_(~seen, -math.inf)[:, None]


def visible_blocks(
    T: int, doc_ids: Tensor | None, window: int | None, device: torch.device
) -> BlockMask:
    """The same for `fused_attention`: which blocks of scores are computed at all, and which keys inside them."""

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ok = i >= j if window is None else (i >= j) & (i - j <= window)
        return ok if doc_ids is None else ok & (doc_ids[b, i] == doc_ids[b, j])

    return create_block_mask(
        seen, None if doc_ids is None else len(doc_ids), None, T, T, device=device
    )


# ---------------------------------------------------------------------------------------------------------------------
# Attention. The reference is the definition: explicit scores, float32 softmax, differentiable everywhere.


class Posterior(NamedTuple):
    """Theorem 1, row by row: posterior = prior * content * exp(log_z). All (B, H, T, T) but log_z, (B, H, T)."""

    prior: Tensor
    content: Tensor
    posterior: Tensor
    log_z: Tensor


def toeplitz(vector: Tensor, rows: int | None = None) -> Tensor:
    """(H, T) by distance -> (H, rows, T), the last `rows` (all) of a T x T matrix: element (i, j) is vector[i - j]
    where j <= i, else 0, for the mask to hide. Row i is a slice of the reversed vector from place T - 1 - i on, so all
    rows are windows of one padded vector."""
    T = vector.shape[-1]
    return F.pad(vector.flip(-1), (0, (rows or T) - 1)).unfold(-1, T, 1).flip(-2)


def log_posterior(
    scores: Tensor, log_prior: Tensor | None, row_scale: Tensor | None, mask: Tensor
) -> Tensor:
    """Content scores (B, H, T, T) and log-prior (H, T, T), times row_scale (B, 1, T, 1): ln posterior + a constant."""
    if log_prior is not None:
        scores = (
            scores + log_prior if row_scale is None else torch.addcmul(scores, log_prior, row_scale)
        )
    return (
        scores + mask
    )  # last, so that no factor can turn a hidden key's -inf into NaN or a finite number


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_prior: Tensor | None,
    row_scale: Tensor | None,
    layout: Layout,
) -> Tensor:
    """Posterior expectation of the values: q, k, v (B, H, T, D), q scaled; log_prior (H, T) by distance -> like q.

    Queries are taken in blocks, so that their scores stay in fast memory, with the keys up to the block's end only."""
    B, H, T, _ = q.shape
    rows = max(1, (CPU_SCORES if q.device.type == "cpu" else GPU_SCORES) // (B * H * T))
    with torch.autocast(q.device.type, enabled=False):
        out = []
        for begin in range(0, T, rows):
            end = min(T, begin + rows)
            scores = q[:, :, begin:end].float() @ k[:, :, :end].float().transpose(-2, -1)
            bias = None if log_prior is None else toeplitz(log_prior[:, :end], end - begin)
            scale = None if row_scale is None else row_scale[:, :, begin:end]
            scores = log_posterior(scores, bias, scale, layout.mask[:, :, begin:end, :end])
            out.append(scores.softmax(-1) @ v[:, :, :end].float())
        return torch.cat(out, dim=2).to(v.dtype)


compiled_flex_attention = torch.compile(
    flex_attention, dynamic=False
)  # compiled when it is first called


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_prior: Tensor | None,
    row_scale: Tensor | None,
    layout: Layout,
) -> Tensor:
    """The same function as one kernel (FlexAttention), for training on CUDA: there is no T x T tensor.

    The kernel makes a block of scores q.k in float32, passes each through `add_prior` and goes on to a running softmax.
    SSMax's s ln n is in q already; the ln n of the prior is a constant of the row. The prior is gathered once from its
    (H, T) vector: a learnable tensor may be read only once here, and its gradient is an atomic sum over all scores that
    share an entry, so H x T entries beat H scalars. Outside, autograd goes on from the vector to theta and s.

    A kernel's gradient at a weight of 1 is rounding noise where the explicit softmax's is 0, and db/dtheta is as large
    as b, which for beta < 0 is huge at the own token. There b is cut to so far from its neighbour's that it silences
    the token, or for s < 0 all others, just as well; a cut value has no gradient, as it should. Nor can the running
    softmax tell large scores apart, so from each row the largest prior that it sees is subtracted.
    """
    if log_prior is not None:
        own, neighbour = (
            log_prior[:, :1],
            log_prior[:, :2].detach()[:, -1:],
        )  # the neighbour of a single token: itself
        far = DECISIVE + neighbour.abs()
        log_prior = torch.cat(
            (own.clamp(neighbour - far, neighbour + far), log_prior[:, 1:]), dim=1
        )
        top = log_prior.detach().cummax(1).values[:, layout.n.expand(len(q), -1) - 1]  # (H, B, T)
    log_n = None if row_scale is None else row_scale.expand(len(q), -1, -1, -1).flatten(1)  # (B, T)

    def add_prior(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if log_prior is None:
            return score
        bias = (
            log_prior[h, (i - j).abs()] - top[h, b, i]
        )  # abs: some scores above the diagonal are computed, for the mask to hide
        return score + (bias if log_n is None else bias * log_n[b, i])

    return compiled_flex_attention(q, k, v, score_mod=add_prior, block_mask=layout.mask, scale=1.0)


def reference_posterior(
    scores: Tensor, log_prior: Tensor | None, row_scale: Tensor | None, mask: Tensor
) -> Posterior:
    """The same scores, taken apart (Theorem 1). Arguments as in `log_posterior`."""
    content = (scores + mask).log_softmax(-1)
    prior = log_posterior(torch.zeros_like(scores), log_prior, row_scale, mask).log_softmax(-1)
    posterior = log_posterior(scores, log_prior, row_scale, mask).softmax(-1)
    log_z = -torch.logsumexp(
        content + prior, dim=-1
    )  # from logarithms: the product of the two may underflow
    return Posterior(prior.exp(), content.exp(), posterior, log_z)


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int = 0):
        super().__init__()
        self.cfg = cfg
        self.qkv = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=False)
        self.out = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        if cfg.ssmax:
            self.s = nn.Parameter(torch.full((cfg.n_head,), float(cfg.ssmax_init)))
        if cfg.pe == "ggd":
            self.prior = GGDPrior(cfg, layer)
        elif cfg.pe == "alibi":
            self.register_buffer("slopes", alibi_slopes(cfg.n_head), persistent=False)

    def log_prior(self, n: int) -> Tensor | None:
        """(H, n) float32: what is added to the scores at the distances |d| = 0 ... n - 1; None for a uniform prior. If
        `prior_has_row_scale`, the row of a query that sees m keys adds this times ln m: together s ln m b. From b its
        largest value is subtracted, which no softmax can see: float32 could not hold small differences of large b."""
        if self.cfg.pe == "ggd":
            b = self.prior(n)
            b = b - b.amax(-1, keepdim=True)
            return (self.s[:, None] * b if self.prior_has_row_scale else b).float()
        if self.cfg.pe == "alibi":
            return -self.slopes[:, None] * torch.arange(n, device=self.slopes.device)
        return None

    @property
    def prior_has_row_scale(self) -> bool:
        return self.cfg.pe == "ggd" and self.cfg.ssmax and self.cfg.ssmax_scales == "posterior"

    def project(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, C) -> q, k, v (B, H, T, D): rotated for RoPE; q times 1/sqrt(D), or s ln n / sqrt(D) with SSMax."""
        B, T, _ = x.shape
        q, k, v = (
            self.qkv(x).view(B, T, 3, self.cfg.n_head, self.cfg.head_dim).permute(2, 0, 3, 1, 4)
        )
        if layout.rotation is not None:
            q, k = rotate(q, *layout.rotation), rotate(k, *layout.rotation)
        scale = layout.log_n * self.s[:, None, None] if self.cfg.ssmax else 1.0  # (B, H, T, 1)
        return (q * (scale / math.sqrt(self.cfg.head_dim))).to(v.dtype), k, v

    def merge(self, y: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, T, C): the heads side by side, then the output projection."""
        B, _, T, _ = y.shape
        return self.out(y.transpose(1, 2).reshape(B, T, self.cfg.n_embd))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        q, k, v = self.project(x, layout)
        row_scale = layout.log_n if self.prior_has_row_scale else None
        attention = fused_attention if isinstance(layout.mask, BlockMask) else reference_attention
        return self.merge(attention(q, k, v, self.log_prior(x.shape[1]), row_scale, layout))

    def posterior(self, x: Tensor, layout: Layout) -> Posterior:
        q, k, _ = self.project(x, layout)
        prior, row_scale = (
            self.log_prior(x.shape[1]),
            layout.log_n if self.prior_has_row_scale else None,
        )
        with torch.autocast(q.device.type, enabled=False):
            content = q.float() @ k.float().transpose(-2, -1)
        return reference_posterior(
            content, None if prior is None else toeplitz(prior), row_scale, layout.mask
        )


# The Transformer -----------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gate_up = nn.Linear(cfg.n_embd, 2 * cfg.hidden, bias=False)
        self.down = nn.Linear(cfg.hidden, cfg.n_embd, bias=False)

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
        self.attention = (
            "reference"  # or "fused": how training computes it; in eval mode it is the reference
        )
        self.window: int | None = (
            None  # hide keys further away than this; with RoPE the paper's Local RoPE
        )
        self.embedding = nn.Embedding(cfg.padded_vocab, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layer))
        self.norm = nn.RMSNorm(cfg.n_embd, eps=1e-5)
        self.head = nn.Linear(cfg.n_embd, cfg.padded_vocab, bias=False)
        if cfg.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal weights of mean 0; norms start at 1, s at ssmax_init, theta where the config says.

        embedding, v, gate_up, head  std = n_embd ** -0.5  (a unit-RMS input gives v and logits of RMS 1)
        q, k                         std = (3 n_embd) ** -0.5  (PyTorch's default, as in the paper: scores of RMS 1/3,
                                     which s ln n sharpens; with scores of RMS 1 a query begins with very few keys)
        out, down                    std = n_embd ** -0.5 / sqrt(2 n_layer)  (2 n_layer branches are added up)
        """
        std = self.cfg.n_embd**-0.5
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
                p.normal_(0.0, std / math.sqrt(2 * self.cfg.n_layer) if residual else std)
            if name.endswith("qkv.weight"):
                p[: 2 * self.cfg.n_embd] /= math.sqrt(3)

    def embed(self, idx: Tensor, positions: Tensor) -> Tensor:
        """Token ids and their positions, (B, T) each (positions may be (1, T)) -> (B, T, C)."""
        x = self.embedding(idx)
        return (
            x + sinusoidal_table(positions, self.cfg.n_embd) if self.cfg.pe == "sinusoidal" else x
        )

    def layout(
        self, positions: Tensor, mask: Tensor | None = None, log_virtual: Tensor | None = None
    ) -> Layout:
        """ln n, RoPE's angles and the mask for queries at `positions` (B or 1, T), counted inside their document."""
        n = positions + 1 if self.window is None else (positions + 1).clamp(max=self.window + 1)
        rotation = None
        if self.cfg.pe == "rope":
            angle = angles(positions, self.cfg.head_dim, ROPE_THETA)[:, None]
            rotation = angle.cos().float(), angle.sin().float()
        log_n = n.float().log()
        if log_virtual is not None:
            log_n = log_n + log_virtual[:, None]
        return Layout(n, log_n[:, None, :, None], rotation, mask)

    def prepare(
        self, idx: Tensor, doc_ids: Tensor | None, log_virtual: Tensor | None
    ) -> tuple[Tensor, Layout]:
        T = idx.shape[1]
        positions = (
            torch.arange(T, device=idx.device)[None]
            if doc_ids is None
            else positions_in_documents(doc_ids)
        )
        make_mask = visible_blocks if self.attention == "fused" and self.training else visible
        mask = make_mask(T, doc_ids, self.window, idx.device)
        return self.embed(idx, positions), self.layout(positions, mask, log_virtual)

    def logits(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., V): final norm and output layer, without the vocabulary's padding."""
        return self.head(self.norm(x))[..., : self.cfg.vocab_size]

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        doc_ids: Tensor | None = None,
        log_virtual: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V), or with targets (B, T; -100 is not counted) the mean cross entropy in nats.

        doc_ids (B, T), growing along a row, such as (idx == eot).cumsum(1): attention, distances, n and positions stay
        inside a document, so packed documents are computed as separate ones, for every encoding. (The authors count
        the sinusoidal's positions over the whole window.)
        log_virtual (B,): what is added to ln n in each row, when training draws a virtual length.
        """
        x, layout = self.prepare(idx, doc_ids, log_virtual)
        for block in self.blocks:
            x = block(x, layout)
        return self.logits(x) if targets is None else self.loss(x, targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, in chunks of rows whose logits are not kept but computed again in the backward pass."""

        def total(x: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.logits(x).float(), targets, reduction="sum")

        x, targets = x.flatten(0, 1), targets.flatten()
        rows = max(1, LOSS_CHUNK // self.cfg.padded_vocab)
        pieces = list(zip(x.split(rows), targets.split(rows), strict=True))
        if len(pieces) == 1:
            return total(x, targets) / (targets != -100).sum()
        losses = [
            recompute(total, *piece, use_reentrant=False, preserve_rng_state=False)
            for piece in pieces
        ]
        return torch.stack(losses).sum() / (targets != -100).sum()

    @torch.no_grad()
    def posteriors(self, idx: Tensor) -> list[Posterior]:
        """Prior, content, posterior and ln Z of every layer for idx (B, T): quadratic memory, for short prompts."""
        T = idx.shape[1]
        positions = torch.arange(T, device=idx.device)[None]
        x, layout = (
            self.embed(idx, positions),
            self.layout(positions, visible(T, None, self.window, idx.device)),
        )
        found = []
        for block in self.blocks:
            found.append(block.attn.posterior(block.norm_attn(x), layout))
            x = block(x, layout)
        return found

    @torch.no_grad()
    def constrain(self) -> None:
        """Put theta_beta back to theta_beta_min where a step went below it. A clamp inside the prior would do the same
        for its value, but a head below would get no gradient and could never come back."""
        if self.cfg.pe == "ggd":
            for block in self.blocks:
                block.attn.prior.theta_beta.clamp_(min=self.cfg.theta_beta_min)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Every parameter exactly once, by name: matrices (decayed), norms, theta (the prior) and s (SSMax)."""
        groups = {"matrix": [], "norm": [], "theta": [], "s": []}
        for name, p in self.named_parameters():
            last = name.split(".")[-1]
            kind = (
                "theta"
                if "theta_" in last
                else "s"
                if last == "s"
                else "norm"
                if "norm" in name
                else "matrix"
            )
            groups[kind].append(p)
        return groups

    def optimizer_groups(
        self, lr: float, prior_lr: float, ssmax_lr: float, weight_decay: float
    ) -> list[dict]:
        """Groups for a torch optimizer. Only matrices and embeddings decay; theta and s have their own rates."""
        rates, decay = (
            {"matrix": lr, "norm": lr, "theta": prior_lr, "s": ssmax_lr},
            {"matrix": weight_decay},
        )
        groups = self.parameter_groups().items()
        return [
            {"name": k, "params": p, "lr": rates[k], "weight_decay": decay.get(k, 0.0)}
            for k, p in groups
            if p
        ]

    def flops_per_token(self, T: int) -> int:
        """Floating-point operations that training on one token of a window of T needs: the model's, no recomputation.

        Each weight multiplies and adds once in the forward pass and twice in the backward; so do, for queries and for
        values, the (T + 1) / 2 keys that a causal query sees on average. An untied embedding is only looked up."""
        weights = sum(p.numel() for p in self.parameter_groups()["matrix"])
        weights -= 0 if self.cfg.tie_embeddings else self.embedding.weight.numel()
        return 6 * weights + 6 * self.cfg.n_layer * self.cfg.n_embd * (T + 1)

    def head_values(self) -> dict[str, list[Tensor]]:
        """theta_alpha, theta_beta, theta_mu and s, as far as there are: name -> the (H,) tensor of each layer."""
        values = {}
        for block in self.blocks:
            tensors = {**dict(block.attn.named_parameters()), **dict(block.attn.named_buffers())}
            for name in ("prior.theta_alpha", "prior.theta_beta", "prior.theta_mu", "s"):
                if name in tensors:
                    values.setdefault(name.split(".")[-1], []).append(tensors[name])
        return values

    def prior_values(self) -> dict[str, list[list[float]]]:
        """The same as numbers, for logs and tables."""
        return {name: [t.tolist() for t in layers] for name, layers in self.head_values().items()}

    def checkpoint(self) -> dict:
        """What `runs.load_model` needs to build this model again; tensors and plain values only."""
        return {"model": self.state_dict(), "model_config": asdict(self.cfg)}
