"""streaming.py computes what model.py computes."""

import itertools
import math

import pytest
import reference
import torch
from conftest import ENCODINGS, make_model

import streaming as S
from model import GPT, PRIORS, ModelConfig, sinusoidal_table


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several chunks, blocks of queries and tiles, also for short texts."""
    monkeypatch.setattr(S, "CHUNK_TOKENS", 80)
    monkeypatch.setattr(S, "BLOCK", 16)
    monkeypatch.setattr(S, "TILE_SCORES", 4096)


def tokens(T, B=2):
    return torch.randint(0, 256, (B, T), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("window", [None, 20, 0])
@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_streamed_logits_equal_full_ones(pe, ssmax, window):
    model, idx = make_model(pe, ssmax, block_size=16), tokens(150)
    model.window = window
    full = model(idx)
    for exact, chunks in (
        (True, [1] * 20 + [130]),
        (False, [7] * 21 + [3]),
        (True, [64, 64, 22]),
        (False, [150]),
    ):
        cache = S.KVCache(model, 2, 150, exact)
        parts = [S.prefill(model, part, cache, part.shape[1]) for part in idx.split(chunks, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_score_equals_full_logits(pe, ssmax):
    model, idx = make_model(pe, ssmax), tokens(130)
    full = model(idx)[:, :-1].log_softmax(-1)
    expected = full.gather(-1, idx[:, 1:, None]).squeeze(-1)
    for n_last in (1, 5, 129):
        log_p, best = S.score(model, idx, n_last)
        torch.testing.assert_close(log_p, expected[:, -n_last:], atol=1e-4, rtol=1e-4)
        top = full[:, -n_last:].gather(-1, best[..., None])[..., 0]  # two tokens may be 1e-5 apart
        torch.testing.assert_close(top, full[:, -n_last:].amax(-1), atol=1e-4, rtol=0)


def test_score_goes_on_from_a_cache():
    model, idx = make_model("ggd", True), tokens(100)
    cache = S.KVCache(model, 2, 100)
    S.prefill(model, idx[:, :60], cache)
    log_p, best = S.score(model, idx[:, 60:], 10, cache)
    expected = S.score(model, idx, 10)
    torch.testing.assert_close(log_p, expected[0], atol=1e-4, rtol=1e-4)
    assert torch.equal(best, expected[1]) and cache.used == 99


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_greedy_generation_is_argmax_of_full_logits(pe, ssmax):
    model, idx = make_model(pe, ssmax), tokens(30)
    new = S.generate(model, idx, 6)
    text = idx
    for _ in range(6):
        text = torch.cat((text, model(text)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(new, text[:, 30:])


def test_generation_goes_on_from_a_cache():
    model, idx = make_model("ggd", True), tokens(30)
    cache = S.KVCache(model, 2, 40)
    S.prefill(model, idx[:, :29], cache)
    assert torch.equal(S.generate(model, idx[:, 29:], 6, cache=cache), S.generate(model, idx, 6))


def test_generation_stops_and_samples_by_seed():
    model, idx = make_model("ggd", True), tokens(30, B=1)
    first = S.generate(model, idx, 1).item()
    assert S.generate(model, idx, 6, stop=first).tolist() == [[first]]
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(S.generate(model, idx, 12, temperature=1.0).tolist())
    assert drawn[0] == drawn[1] != drawn[2]


def test_prior_strip_is_the_prior_by_distance():
    """Row r is of query stop - 1 - r, column c of key begin + c; the future is -inf."""
    length = 40
    prior = -torch.arange(float(length)).square() * torch.tensor([[1.0], [0.5]])
    reversed_prior = torch.nn.functional.pad(prior.flip(-1), (0, S.BLOCK), value=-torch.inf)
    for rows, begin, end, stop in (
        (4, 0, 9, 9),
        (1, 3, 12, 12),
        (16, 16, 32, 32),
        (5, 8, 16, 40),
        (16, 0, 40, 40),
    ):
        strip = S.prior_strip(reversed_prior, slice(None), rows, begin, end, stop)
        assert strip.shape == (2, rows, end - begin) and strip._base is reversed_prior
        for r, c in itertools.product(range(rows), range(end - begin)):
            i, j = stop - 1 - r, begin + c
            expected = prior[:, i - j] if j <= i else torch.full((2,), -torch.inf)
            assert torch.equal(strip[:, r, c], expected)


# Skipping -----------------------------------------------------------------------------------------

SHAPES = {
    "window": (-3.24, 8.0),
    "laplace": (-1.5, 1.0),
    "uniform": (0.0, 0.0),
    "anti-local": (0.5, -1.0),
}


def one_layer(ssmax, s=0.5, theta_mu=0.0, T=400, B=2):
    """A layer with a head of each shape; one of its keys is so large that it is heard far away."""
    alpha, beta = zip(*SHAPES.values(), strict=True)
    model = make_model(
        "ggd", ssmax, n_layer=1, theta_alpha=alpha, theta_beta=beta, theta_mu=(theta_mu,)
    )
    if ssmax:
        torch.nn.init.constant_(model.blocks[0].attn.s, s)
    generator = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, B, 4, T, model.cfg.head_dim, generator=generator)
    k[1, :, 5] = 320 / q[1, :, T - 20].norm(dim=-1, keepdim=True) ** 2 * q[1, :, T - 20]
    return model, q, k, v


def dense_posterior(model, q, k):
    """In float64: (B, H, T, T)."""
    attn, T = model.blocks[0].attn, q.shape[2]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    _, scale = attn.ssmax(torch.arange(1, T + 1).double().log()[:, None])
    prior = attn.log_prior(T).double()[:, distance.clamp(min=0)]
    scores = q.double() @ k.double().transpose(-1, -2) + scale * prior
    return scores.masked_fill(distance < 0, -torch.inf).softmax(-1)


def attended(model, q, k, v, exact=False):
    T = q.shape[2]
    cache = S.KVCache(model, 2, T, exact)
    cache.layers[0].append(0, k, v)
    _, row_scale = model.blocks[0].attn.ssmax(model.layout(torch.arange(T)[None]).log_n)
    return S.attend(cache, cache.layers[0], q, T, row_scale), cache


def watch_left_out(monkeypatch, posterior):
    """Lets `needed_blocks` note, for each head, the largest posterior mass that a query loses."""
    left_out, needed_blocks = torch.zeros(4), S.needed_blocks

    def watched(queries, log_evidence, norms, *rest):
        needed = needed_blocks(queries, log_evidence, norms, *rest)
        rows = posterior[:, :, queries.stop - queries.q.shape[2] : queries.stop]
        far = rows[..., : norms.shape[-1] * S.BLOCK]
        far = far.unflatten(-1, (-1, S.BLOCK)).sum(-1)  # (B, H, R, blocks)
        mass = (far * ~needed[:, None]).sum(-1).amax((0, 2))
        left_out.copy_(torch.maximum(left_out, mass.float()))
        return needed

    monkeypatch.setattr(S, "needed_blocks", watched)
    return left_out


@pytest.mark.parametrize("tolerance", [1e-8, 1e-3])
@pytest.mark.parametrize("theta_mu", [0.0, -1.5])
@pytest.mark.parametrize(("ssmax", "s"), [(False, 1), (True, 0.5), (True, -0.5)])
@torch.no_grad()
def test_skipping_leaves_out_less_than_the_tolerance(monkeypatch, ssmax, s, theta_mu, tolerance):
    monkeypatch.setattr(S, "SKIP_TOLERANCE", tolerance)
    model, q, k, v = one_layer(ssmax, s, theta_mu)
    left_out = watch_left_out(monkeypatch, dense_posterior(model, q, k))
    out, cache = attended(model, q, k, v)
    assert left_out.max() <= tolerance
    difference = (out - attended(model, q, k, v, exact=True)[0]).abs().max()
    # 1e-5: rounding, since other products are taken
    assert difference <= (2 * tolerance + 1e-5) * v.abs().max()
    skipped = dict(zip(SHAPES, cache.skipped()[0].tolist(), strict=True))
    assert skipped["uniform"] == 0
    if s > 0:
        assert skipped["window"] > 0.8 and 0 < skipped["laplace"] < 0.8
        assert skipped["anti-local"] == 0
    else:  # turned round: the anti-local head keeps the own token, the others look far away
        assert skipped["window"] == skipped["laplace"] == 0
        assert theta_mu or skipped["anti-local"] > 0.8


@pytest.mark.parametrize(
    ("s", "theta_beta", "theta_mu"), [(0.5, 1.0, 0.0), (0.5, 0.02, 0.0), (-0.5, -2.0, 0.9)]
)
@torch.no_grad()
def test_skipped_mass_where_nothing_but_the_prior_counts(monkeypatch, s, theta_beta, theta_mu):
    """Content 0, where its bound is tight; a straight, a nearly flat and a flat tail."""
    skipped = []
    for start in torch.arange(-2.0, 5.0, 0.2).tolist():
        model, q, k, v = one_layer(True, s, theta_mu, T=100)
        prior = model.blocks[0].attn.prior
        prior.theta_alpha.copy_(start + torch.arange(4) * 0.05), prior.theta_beta.fill_(theta_beta)
        with monkeypatch.context() as patch:
            left_out = watch_left_out(patch, dense_posterior(model, 0 * q, k))
            _, cache = attended(model, 0 * q, k, v)
        assert left_out.max() <= S.SKIP_TOLERANCE
        skipped.append(cache.skipped().mean().item())
    assert min(skipped) == 0 and max(skipped) > 0.4 and len(set(skipped)) > 2


@torch.no_grad()
def test_a_large_key_far_away_is_heard_through_a_falling_prior():
    """Without the keys' norms in the bound the Laplace head would skip the key that matters."""
    model, q, k, v = one_layer(True)
    assert dense_posterior(model, q, k)[1, 1, 380, 5] > 0.99
    torch.testing.assert_close(
        attended(model, q, k, v)[0][1, 1, 380], v[1, 1, 5], atol=0.01, rtol=0
    )


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_exact_and_skipping_scores_agree(pe, ssmax):
    local = {"theta_alpha": (-3.24, -1.0, 0.0, 0.0), "theta_beta": (8.0, 1.5, 0.0, -2.0)}
    model, idx = make_model(pe, ssmax, **(local if pe == "ggd" else {})), tokens(400)
    caches = [S.KVCache(model, 2, 399, exact=exact) for exact in (False, True)]
    skipping, exact = (S.score(model, idx, 20, cache) for cache in caches)
    torch.testing.assert_close(skipping[0], exact[0], atol=1e-4, rtol=0)
    assert torch.equal(skipping[1], exact[1])
    assert caches[1].skipped().abs().max() == 0 and caches[0].skipped().shape == (2, 4)
    if pe == "alibi":  # slopes 1/4 ... 1/256 over 400 tokens
        assert caches[0].skipped()[0, 0] > 0.3
    elif pe not in PRIORS:
        assert caches[0].skipped().max() == 0


def test_no_prior_is_a_denormal_number():
    """A CPU computes several times as slowly with them. Not a number stays what it is."""
    attn = make_model("ggd", True, theta_beta=(-15.0, 1.0, 2.0, math.nan)).blocks[0].attn
    assert (attn.prior(4000)[0, -1].float().abs() < torch.finfo(torch.float32).tiny).item()
    prior = S.LayerCache(attn, 1, 4000, torch.float32).reversed_prior[..., :4000]
    assert prior[0, 0] == 0 and prior[0, -16] < 0 and prior[3].isnan().all()


def test_a_window_limits_the_work():
    model, idx = make_model("rope", True), tokens(400)
    model.window = 20
    cache = S.KVCache(model, 2, 399)
    S.score(model, idx, 1, cache)
    assert cache.layers[0].visible < 100  # of more than 25 * 26 / 2 = 325


# The cache ----------------------------------------------------------------------------------------


def test_rewound_cache_goes_on_as_if_it_had_never_seen_the_rest():
    """Also inside a block, where a forgotten key was the largest."""
    model, idx = make_model("ggd", True), tokens(100)
    cache = S.KVCache(model, 2, 100)
    S.prefill(model, idx, cache)
    for layer in cache.layers:
        layer.keys[:, :, 70:] *= 100
        layer.append(70, layer.keys[:, :, 70:], layer.values[:, :, 70:])
    cache.rewind(67)
    rest = (idx[:, 67:] + 1) % 256
    again = S.prefill(model, rest, cache, 33)
    fresh = S.KVCache(model, 2, 100)
    S.prefill(model, idx[:, :67], fresh)
    torch.testing.assert_close(again, S.prefill(model, rest, fresh, 33), atol=1e-4, rtol=0)
    for old, new in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(old.norms, new.norms, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keys_and_values(dtype):
    model, idx = make_model("ggd", True), tokens(200)
    cache = S.KVCache(model, 2, 199, dtype=dtype)
    log_p, _ = S.score(model, idx, 20, cache)
    expected, _ = S.score(model, idx, 20)
    error = (log_p - expected).abs().max()
    assert 0 < error < {torch.float16: 0.03, torch.bfloat16: 0.2}[dtype]
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert sum(t.nbytes for t in tensors) == 2 * 2 * 2 * 199 * model.cfg.n_embd * dtype.itemsize
    assert all(t.dtype == dtype for t in tensors)


def test_cache_of_the_120m_model_at_524288_tokens():
    """On the meta device: 12 x 2 x 768 channels in 2 bytes; priors and norms are under 3%."""
    with torch.device("meta"):
        model = GPT(ModelConfig(vocab_multiple=64))
        cache = S.KVCache(model, 1, 2**19, dtype=torch.float16)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    held = [t for layer in cache.layers for t in vars(layer).values()]
    assert kept == 18 * 2**30
    assert sum(t.nbytes for t in held if isinstance(t, torch.Tensor)) < 1.03 * kept


def test_a_cache_that_no_memory_could_hold_is_refused():
    with pytest.raises(ValueError, match="choose a shorter length"):
        S.KVCache(make_model("nope", False), 1, 2**50)


# Exactness of positions ---------------------------------------------------------------------------

FAR = torch.tensor([0, 1, 65_535, 524_287, 999_999, 1_000_000])


def test_positions_are_exact_to_a_million_tokens():
    """ln n, RoPE's cos and sin, the sinusoidal table, against float64 by Python's math."""
    model = make_model("rope", True)
    _, log_n, (cos, sin), *_ = model.layout(FAR[None])
    table = sinusoidal_table(FAR, 32) * math.sqrt(32)
    for row, position in enumerate(FAR.tolist()):
        assert log_n[0, 0, row, 0].item() == pytest.approx(math.log(position + 1), rel=1e-6)
        for i in range(4):
            angle = position * 500_000.0 ** (-2 * i / 8)
            assert cos[0, 0, row, i].item() == pytest.approx(math.cos(angle), abs=1e-6)
            assert sin[0, 0, row, i].item() == pytest.approx(math.sin(angle), abs=1e-6)
        for i in range(16):
            angle = position * 10_000.0 ** (-2 * i / 32)
            assert table[row, i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[row, 16 + i].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_priors_are_exact_to_a_million_tokens():
    """Relative to float64. At beta = 1 the logarithm of the prior is the distance itself."""
    alpha, beta, mu = (0.0, -2.0, 0.5, 1.0), (1.0, 0.3, -0.8, 2.0), (0.0, 0.7, 0.0, -0.7)
    cases = {"theta_alpha": alpha, "theta_beta": beta, "theta_mu": mu}
    attn = make_model("ggd", False, **cases).blocks[0].attn
    prior, added = attn.prior(1_000_001).detach(), attn.log_prior(1_000_001)
    torch.testing.assert_close(
        added.double(), prior - prior.amax(1, keepdim=True), rtol=1e-6, atol=0
    )
    alibi = make_model("alibi", True).blocks[0].attn.log_prior(1_000_001)
    for d in FAR.tolist():
        for h, (alpha, beta, mu) in enumerate(zip(*cases.values(), strict=True)):
            base = abs(-d - 2 * math.sinh(mu)) + 1e-5
            assert prior[h, d].item() == pytest.approx(
                -math.exp(alpha + beta * math.log(base)), rel=3e-5
            )
        assert alibi[:, d].tolist() == [-d / 4, -d / 16, -d / 64, -d / 256]


def test_first_query_is_exact_where_ln_n_is_0():
    """ln 1 = 0 must not meet -inf."""
    model = make_model("ggd", True)
    logits = S.prefill(model, tokens(1), S.KVCache(model, 2, 1), 1)
    torch.testing.assert_close(logits, model(tokens(1)), atol=1e-4, rtol=0)


def test_what_does_not_fit_is_refused():
    model, idx = make_model("nope", False), tokens(20)
    with pytest.raises(ValueError, match="do not fit"):
        S.prefill(model, idx, S.KVCache(model, 2, 19))


# Against the dense model in float64 ---------------------------------------------------------------


def dense_attention(cfg, p, layer, q, k, v, first):
    """Of the queries from `first` on, in blocks; q (H, T - first, D), k, v (H, T, D), float64."""
    (H, T, D), out = k.shape, torch.empty_like(q)
    log_n = torch.arange(1, T + 1).double().log()
    sharp = p[f"blocks.{layer}.attn.s"][:, None] * log_n if cfg.ssmax else torch.ones(H, T).double()
    priors = [reference.log_prior(cfg, p, layer, h, torch.arange(T).double()) for h in range(H)]
    prior, scale = torch.stack(priors), torch.ones(H, T) if cfg.pe == "alibi" else sharp
    q = q * sharp[:, first:, None] / math.sqrt(D)
    for begin in range(first, T, 32):
        rows = range(begin, min(begin + 32, T))
        scores = q[:, begin - first : rows.stop - first] @ k[:, : rows.stop].transpose(1, 2)
        for row, i in enumerate(rows):
            scores[:, row, i + 1 :] = -torch.inf
            scores[:, row, : i + 1] += scale[:, i, None] * prior[:, : i + 1].flip(-1)
        out[:, begin - first : rows.stop - first] = scores.softmax(-1) @ v[:, : rows.stop]
    return out


@torch.no_grad()
def dense_score(model, idx, n_last):
    """Log-probabilities of the last n_last tokens of idx (T,) in float64."""
    cfg, p = model.cfg, {name: t.detach() for name, t in reference.parameters(model).items()}
    T, H, D = len(idx) - 1, cfg.n_head, cfg.head_dim
    x, positions = p["embedding.weight"][idx[:-1]], torch.arange(T).double()[:, None]
    if cfg.pe == "sinusoidal":
        angle = positions / 10_000.0 ** (torch.arange(0, cfg.n_embd, 2).double() / cfg.n_embd)
        x = x + torch.cat((angle.sin(), angle.cos()), 1) / math.sqrt(cfg.n_embd)
    for layer in range(cfg.n_layer):
        first, name = 0 if layer < cfg.n_layer - 1 else T - n_last, f"blocks.{layer}."
        h = reference.norm(x, p[name + "norm_attn.weight"])
        q, k, v = (h @ p[name + "attn.qkv.weight"].T).view(T, 3, H, D).permute(1, 2, 0, 3)
        if cfg.pe == "rope":
            angle = positions * 500_000.0 ** (-torch.arange(0, D, 2).double() / D)
            turn = torch.polar(torch.ones_like(angle), angle)
            q, k = (torch.complex(*t.chunk(2, -1)) * turn for t in (q, k))
            q, k = (torch.cat((t.real, t.imag), -1) for t in (q, k))
        y = dense_attention(cfg, p, layer, q[:, first:], k, v, first)
        y = y.transpose(0, 1).reshape(T - first, cfg.n_embd)
        x = x[first:] + y @ p[name + "attn.out.weight"].T
        hidden = reference.norm(x, p[name + "norm_mlp.weight"]) @ p[name + "mlp.gate_up.weight"].T
        gate, up = hidden.chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ p[name + "mlp.down.weight"].T
    logits = reference.norm(x[-n_last:], p["norm.weight"]) @ p["head.weight"].T
    return logits.log_softmax(-1).gather(1, idx[-n_last:, None])[:, 0]


def assert_score_is_dense(model, T):
    idx = tokens(T, B=1)
    log_p, _ = S.score(model, idx, 20)
    torch.testing.assert_close(log_p[0].double(), dense_score(model, idx[0], 20), atol=1e-4, rtol=0)


def default_model(pe, ssmax, **changes):
    """The shape of config/ggd_bam_cpu.py; with ggd two windows and two anti-local heads a layer."""
    shape = {"n_layer": 3, "n_embd": 128, "block_size": 256}
    if pe == "ggd":
        shape |= {"theta_alpha": (-3.24, -16.64, 0.0, 0.0), "theta_beta": (8.0, 8.0, -1.0, -2.0)}
    model = make_model(pe, ssmax, **shape | changes)
    for block in model.blocks if ssmax else ():
        torch.nn.init.constant_(block.attn.s, 0.18)
    return model


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_score_is_the_dense_one_in_float64(pe, ssmax):
    assert_score_is_dense(default_model(pe, ssmax), 500)


@pytest.mark.slow
@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_score_at_20_000_tokens_is_the_dense_one_in_float64(monkeypatch, pe, ssmax):
    monkeypatch.undo()  # blocks and chunks as they are
    assert_score_is_dense(default_model(pe, ssmax), 20_000)


@pytest.mark.slow
@pytest.mark.parametrize(("pe", "ssmax"), [("ggd", True), ("rope", False)])
def test_score_at_200_000_tokens_is_the_dense_one_in_float64(monkeypatch, pe, ssmax):
    monkeypatch.undo()
    theta = {"theta_alpha": (0.0,), "theta_beta": (-1.0,)} if pe == "ggd" else {}
    assert_score_is_dense(
        default_model(pe, ssmax, n_layer=2, n_head=1, n_embd=16, **theta), 200_000
    )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, None])
@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_cuda_score_is_the_dense_one(monkeypatch, pe, ssmax, dtype):
    """None: the dtype that a cache has on CUDA."""
    monkeypatch.undo()
    model, idx = default_model(pe, ssmax), tokens(2000, B=1)
    expected = dense_score(model, idx[0], 20)
    model = model.cuda()
    log_p, _ = S.score(model, idx.cuda(), 20, S.KVCache(model, 1, 1999, dtype=dtype))
    torch.testing.assert_close(
        log_p[0].double().cpu(), expected, atol=1e-4 if dtype else 0.02, rtol=0
    )


@pytest.mark.cuda
def test_cuda_tiles_fit_the_free_memory():
    cache = S.KVCache(make_model("ggd", True).cuda(), 1, 1000)
    assert cache.layers[0].keys.dtype == torch.float16
    assert 0 < cache.tile_scores * 8 <= torch.cuda.mem_get_info()[0]
    assert cache.chunk_tokens == S.CUDA_CHUNK_TOKENS
