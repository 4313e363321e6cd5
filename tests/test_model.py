"""model.py against the float64 reference, and every limit that its comments state."""

import math

import pytest
import reference
import torch
from conftest import ENCODINGS, make_model, posteriors
from torch.nn import functional as F

import model as M
import runs as checkpoint
from streaming import score

EOT = 256


def tokens(T, B=2, seed=0):
    return torch.randint(0, 256, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_logits_and_gradients_equal_the_float64_reference(pe, ssmax):
    """Two packed documents; values and the gradient of every parameter."""
    model = make_model(pe, ssmax, theta_learned=("alpha", "beta", "mu"))
    idx = tokens(14, B=1)
    doc_ids = torch.tensor([[0] * 6 + [1] * 8])
    p = reference.parameters(model)
    expected = reference.forward(model, p, idx[0].tolist(), [0] * 6 + [6] * 8)
    got = model(idx, doc_ids=doc_ids)[0]
    torch.testing.assert_close(got.double(), expected, atol=2e-4, rtol=1e-4)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    (got * weight).sum().backward()
    (expected * weight).sum().backward()
    for name, parameter in model.named_parameters():
        scale = p[name].grad.abs().max()
        assert (parameter.grad - p[name].grad).abs().max() < 1e-4 * scale + 1e-6, name
        assert scale > 0, f"{name} has no influence"


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_causality_by_gradient(pe, ssmax):
    """The output at t depends on every input up to t, and not at all on later ones."""
    model = make_model(pe, ssmax)
    found = {}
    model.embedding.register_forward_hook(
        lambda *a: found.setdefault("x", a[2].detach().requires_grad_())
    )
    logits = model(tokens(12, B=1))
    (gradient,) = torch.autograd.grad(logits[0, 7].square().sum(), found["x"])
    size = gradient[0].abs().amax(-1)
    assert (size[:8] > 0).all() and (size[8:] == 0).all()


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_packed_documents_equal_separate_ones(pe, ssmax, float64):
    model = make_model(pe, ssmax).double()
    first, second = tokens(9, B=1), tokens(14, B=1, seed=1)
    packed = model(torch.cat((first, second), 1), doc_ids=torch.tensor([[0] * 9 + [1] * 14]))
    torch.testing.assert_close(
        packed, torch.cat((model(first), model(second)), 1), atol=1e-10, rtol=0
    )


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_logits_do_not_depend_on_what_follows(pe, ssmax, float64):
    """n is the number of keys that this query sees, never the length of the text."""
    model, idx = make_model(pe, ssmax).double(), tokens(40)
    torch.testing.assert_close(model(idx)[:, :15], model(idx[:, :15]), atol=1e-10, rtol=0)


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_forward_far_past_block_size_with_finite_gradients(pe, ssmax):
    model = make_model(pe, ssmax, block_size=16)
    idx = tokens(600, B=1)
    model(idx, idx.roll(-1, 1)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_window_hides_far_keys(pe, ssmax, float64):
    """With a window of 0 every token sees only itself; a window of T - 1 changes nothing."""
    model, idx = make_model(pe, ssmax, n_layer=1).double(), tokens(10)

    def within(window, idx):
        model.window = window
        return model(idx)

    alone = model(idx, doc_ids=torch.arange(10).repeat(2, 1))
    if pe != "sinusoidal":  # whose positions go on counting inside a window
        torch.testing.assert_close(within(0, idx), alone, atol=1e-10, rtol=0)
    torch.testing.assert_close(within(9, idx), within(None, idx))
    changed = idx.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 256
    difference = (within(3, idx) - within(3, changed)).abs().amax((0, 2))
    assert (difference[2:6] > 0).all() and (difference[6:] == 0).all()


@pytest.mark.parametrize("ssmax", [False, True])
@pytest.mark.parametrize("extreme", [-1e4, -50.0, -8.0, 8.0, 50.0, 1e4])
@pytest.mark.parametrize("name", ["theta_alpha", "theta_beta", "theta_mu"])
def test_theta_at_its_extremes(name, extreme, ssmax):
    if name == "theta_mu":
        extreme = max(-40.0, min(40.0, extreme))  # mu = 2 sinh(40) is 2e17 tokens away
    model = make_model("ggd", ssmax, theta_learned=("alpha", "beta", "mu"), **{name: (extreme,)})
    if ssmax:
        with torch.no_grad():
            model.blocks[0].attn.s.fill_(-1.0)
    idx = tokens(32)
    loss = model(idx, idx.roll(-1, 1))
    loss.backward()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert loss.isfinite() and total.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("beta", [2.0, 1.0, 0.5, 0.0, -0.5, -2.0])
def test_prior_values_and_gradients_with_distance_0(beta):
    cfg = make_model("ggd", True, theta_learned=("alpha", "beta", "mu")).cfg
    prior = M.GGDPrior(cfg)
    with torch.no_grad():
        prior.theta_alpha.fill_(0.3)
        prior.theta_beta.fill_(beta)
    b = prior(100)
    expected = -math.exp(0.3) * (torch.arange(100, dtype=torch.float64) + 1e-5) ** beta
    torch.testing.assert_close(b[0].double(), expected, rtol=1e-4, atol=1e-6)
    b.sum().backward()
    assert all(p.grad.isfinite().all() for p in prior.parameters())


@pytest.mark.parametrize("beta", [2.0, 1.0, 0.5])
def test_log_prior_is_the_generalized_gaussian_density_up_to_a_constant(beta):
    """alpha = exp(-theta_alpha / theta_beta); its constant is the same for every distance."""
    thetas = {"theta_alpha": (0.7,), "theta_beta": (beta,), "theta_mu": (-0.4,)}
    prior = M.GGDPrior(make_model("ggd", False, **thetas).cfg)
    d, alpha, mu = -torch.arange(50).double(), math.exp(-0.7 / beta), 2 * math.sinh(-0.4)
    factor = beta / (2 * alpha * math.gamma(1 / beta))
    density = factor * torch.exp(-(((d - mu).abs() / alpha) ** beta))
    difference = prior(50)[0].double()[:8] - density.log()[:8]
    # EPSILON alone makes 2e-4; a wrong alpha, beta or mu more than 0.1
    torch.testing.assert_close(difference, difference[:1].expand(8), atol=2e-3, rtol=0)


def test_gradient_of_the_prior_at_theta_0():
    prior = M.GGDPrior(make_model("ggd", False, theta_alpha=(0.0,), theta_beta=(0.0,)).cfg)
    prior(50)[0, 20].backward()
    assert prior.theta_beta.grad[0].item() == pytest.approx(-math.log(20 + M.EPSILON), rel=1e-5)
    assert prior.theta_alpha.grad[0].item() == pytest.approx(-1.0)


@pytest.mark.parametrize("beta", [2.0, 0.5, 0.0, -0.5, -1.0, -3.0, -4.0])
def test_gradients_of_the_prior_at_the_own_token(beta):
    """db/dtheta_alpha = b, db/dtheta_beta = b ln EPSILON; beyond MAX_EXPONENT the tangent's."""
    prior = M.GGDPrior(make_model("ggd", False, theta_alpha=(0.3,), theta_beta=(beta,)).cfg)
    b = prior(10)[:, 0]
    b.sum().backward()
    x = 0.3 + beta * math.log(M.EPSILON)
    expected = torch.full((4,), -math.exp(min(x, M.MAX_EXPONENT)))
    torch.testing.assert_close(prior.theta_alpha.grad, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        prior.theta_beta.grad, expected * math.log(M.EPSILON), rtol=1e-5, atol=0
    )
    assert (b >= -math.exp(M.MAX_EXPONENT) * 50).all()


def copy_weights(source, target):
    """All weights that both have."""
    target.load_state_dict(source.state_dict(), strict=False)


@pytest.mark.parametrize("theta_alpha", [0.0, 1.5])
@pytest.mark.parametrize("ssmax", [False, True])
def test_theta_0_is_nope(ssmax, theta_alpha, float64):
    """And so is theta_beta = 0 with any theta_alpha: the same b for every key."""
    ggd = make_model("ggd", ssmax, theta_alpha=(theta_alpha,), theta_beta=(0.0,))
    nope = make_model("nope", ssmax)
    copy_weights(ggd.double(), nope.double())
    torch.testing.assert_close(ggd(tokens(200)), nope(tokens(200)), atol=1e-10, rtol=0)


@pytest.mark.parametrize("n_head", [8, 12])
def test_beta_1_is_alibi(n_head):
    log_slopes = tuple(M.alibi_slopes(n_head).log().tolist())
    shape = {"n_head": n_head, "n_embd": 4 * n_head}
    ggd = make_model("ggd", False, theta_alpha=log_slopes, theta_beta=(1.0,), **shape)
    alibi = make_model("alibi", False, **shape)
    copy_weights(ggd, alibi)
    expected = alibi(tokens(256))
    # theta_alpha, the logarithm of a slope, is a float32: some 5e-7
    assert (ggd(tokens(256)) - expected).norm() < 1e-5 * expected.norm()
    b = ggd.blocks[0].attn.log_prior(2000), alibi.blocks[0].attn.log_prior(2000)
    torch.testing.assert_close(*b, rtol=2e-4, atol=1e-4)


def test_anti_local_prior_hushes_near_keys_and_is_flat_far_away():
    b = M.GGDPrior(make_model("ggd", False, theta_alpha=(0.0,), theta_beta=(-0.6,)).cfg)(100_000)[0]
    assert b[0] < -900 and b[1].item() == pytest.approx(-1.0, abs=1e-3)
    assert (b.diff() > 0).sum() > 1000 and b[-1] > -0.002


@pytest.mark.parametrize(
    ("n_head", "expected"),
    [
        (8, [2.0**-h for h in range(1, 9)]),
        (16, [2 ** (-h / 2) for h in range(1, 17)]),
        (12, [2.0**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
        (24, [2 ** (-h / 2) for h in range(1, 17)] + [2 ** (-0.25 - h / 2) for h in range(8)]),
    ],
)
def test_alibi_slopes(n_head, expected):
    torch.testing.assert_close(M.alibi_slopes(n_head), torch.tensor(expected))


def test_alibi_mass_beyond_a_distance_is_bounded_at_every_length():
    """Lemma 3: at most e^(-m (w + 1)), whatever n."""
    model = make_model("alibi", False)
    for n in (100, 10_000):
        weights = model.blocks[0].attn.log_prior(n).softmax(-1)
        for slope, weight in zip(M.alibi_slopes(4).tolist(), weights, strict=True):
            assert weight[41:].sum() <= math.exp(-slope * 41) * (1 + 1e-4)


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_posterior_is_content_times_prior_times_z(pe, ssmax):
    """Theorem 1, every factor against its float64 value from the reference's scores."""
    model = make_model(pe, ssmax)
    idx = tokens(10, B=1)
    p = reference.parameters(model)
    x = p["embedding.weight"][idx[0]]
    if pe == "sinusoidal":
        x = x + M.sinusoidal_table(torch.arange(10), model.cfg.n_embd)
    x = reference.norm(x, p["blocks.0.norm_attn.weight"])
    found = posteriors(model, idx)[0]
    for h, i, js, content, prior, _ in reference.attention_rows(model.cfg, p, 0, x, [0] * 10):
        row = slice(0, len(js))
        p_content, p_prior = content.softmax(0), prior.softmax(0)
        z = 1 / (p_content * p_prior).sum()
        for got, expected in (
            (found.content, p_content),
            (found.prior, p_prior),
            (found.posterior, p_content * p_prior * z),
        ):
            torch.testing.assert_close(got[0, h, i, row].double(), expected, atol=1e-5, rtol=1e-4)
            assert (got[0, h, i, len(js) :] == 0).all()
            assert got[0, h, i].sum().item() == pytest.approx(1, abs=1e-5)
        assert found.log_z[0, h, i].item() == pytest.approx(z.log().item(), abs=1e-4)
    product = found.content * found.prior * found.log_z.exp()[..., None]
    torch.testing.assert_close(product, found.posterior, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("g", [30.0, 300.0])
def test_z_is_at_least_1_and_large_where_content_fights_the_prior(g):
    """Both on one key: ln Z = 0. Each certain of another, by g nats: about g, even if e^-g is 0."""
    content, row, mask = torch.tensor([[[[g, 0.0, 0.0]]]]), torch.ones(1, 1, 1, 1), torch.zeros(3)
    far, near = torch.tensor([[[0.0, -g, -g]]]), torch.tensor([[[-g, -g, 0.0]]])
    agree = M.reference_posterior(content, far, row, mask).log_z.item()
    fight = M.reference_posterior(content, near, row, mask).log_z.item()
    assert agree == pytest.approx(0, abs=1e-6) and fight == pytest.approx(g - math.log(2), abs=1e-3)
    for pe, ssmax in ENCODINGS:
        assert (posteriors(make_model(pe, ssmax), tokens(12))[1].log_z > -1e-5).all()


def test_log_z_is_ln_n_where_one_factor_is_uniform():
    log_z = posteriors(make_model("nope", False), tokens(30, B=1))[0].log_z[0]
    expected = torch.arange(1.0, 31).log().expand_as(log_z)
    torch.testing.assert_close(log_z, expected, atol=1e-5, rtol=1e-5)


def test_posteriors_of_a_model_that_trains_fused():
    model, idx = make_model("ggd", True), tokens(12)
    expected = posteriors(model, idx)
    model.attention = "fused"
    pairs = zip(posteriors(model, idx), expected, strict=True)
    assert all(torch.equal(a.posterior, b.posterior) for a, b in pairs)


def test_query_0_puts_all_its_weight_on_key_0():
    for pe, ssmax in ENCODINGS:
        posterior = posteriors(make_model(pe, ssmax), tokens(5))[0].posterior
        assert (posterior[:, :, 0, 0] == 1).all(), (pe, ssmax)


@pytest.mark.parametrize("ssmax", [False, True])
def test_a_key_above_the_others_fades_without_ssmax_only(ssmax):
    """Every query sees one key, the first, whose score is g above all n - 1 others: its weight is
    e^g / (e^g + n - 1) without, and n^(s g) / (n^(s g) + n - 1) with SSMax."""
    attn, T, g, s = make_model("nope", ssmax).blocks[0].attn, 1000, 4.0, 0.5
    x = torch.zeros(1, T, attn.cfg.n_embd)
    x[:, :, 0], x[:, 0, 1] = 1.0, 1.0  # channel 0 makes every query, channel 1 the first key
    with torch.no_grad():
        attn.qkv.weight.zero_()
        q, k, _ = attn.qkv.weight.view(3, attn.cfg.n_head, attn.cfg.head_dim, -1)
        q[:, 0, 0], k[:, 0, 1] = 1.0, g * math.sqrt(attn.cfg.head_dim)
        if ssmax:
            attn.s.fill_(s)
        layout = M.GPT(attn.cfg).layout(torch.arange(T)[None])
        q, k, _ = attn.project(x, layout)
        weight = attn.posterior(q, k, layout, torch.arange(T)).posterior[0, :, :, 0]  # (H, T)
    n = torch.arange(1.0, T + 1)
    above = n ** (s * g) if ssmax else math.exp(g)
    expected = (above / (above + n - 1)).expand_as(weight)
    torch.testing.assert_close(weight, expected, rtol=1e-4, atol=0)
    assert (weight[:, -1] > 0.99).all() if ssmax else (weight[:, -1] < 0.06).all()


def test_rope_depends_on_the_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 32, generator=torch.Generator().manual_seed(0)).unbind(0)

    def score(i, j):
        sides = []
        for x, t in ((q, i), (k, j)):
            angle = M.angles(torch.tensor([[t]]), 32, M.ROPE_THETA)[:, None]
            sides.append(M.rotate(x, angle.cos().float(), angle.sin().float()))
        return (sides[0] * sides[1]).sum().item()

    assert score(40, 7) == pytest.approx(score(100_040, 100_007), abs=1e-5)
    assert score(40, 7) != pytest.approx(score(41, 7), abs=1e-3)


@pytest.mark.parametrize("pe", ["nope", "alibi", "ggd"])
def test_a_virtual_length_is_a_larger_n(pe):
    """Training with ln n + u has the base n e^u; a single key has all the weight anyway."""
    model, idx = make_model(pe, True, virtual_length=50.0), tokens(12)
    u = torch.tensor([0.0, math.log(50)])
    p, log = reference.parameters(model), math.log
    for row, extra in zip(idx, u.tolist(), strict=True):
        reference.math.log = lambda n, extra=extra: log(n) + extra
        try:
            expected = reference.forward(model, p, row.tolist())
        finally:
            reference.math.log = log
        got = model(row[None], log_virtual=torch.tensor([extra]))[0]
        torch.testing.assert_close(got.double(), expected, atol=2e-4, rtol=1e-4)
    assert torch.equal(model(idx[:1], log_virtual=u[:1]), model(idx[:1]))


def test_positions_angles_and_ln_n_are_exact_to_a_million():
    model = make_model("rope", True)
    positions = torch.tensor([[999_983, 999_999]])
    layout = model.layout(positions)
    torch.testing.assert_close(
        layout.log_n.double().flatten(), torch.log(positions[0].double() + 1), rtol=1e-6, atol=0
    )
    for channel in range(model.cfg.head_dim // 2):
        angle = 999_983 * 500_000.0 ** (-2 * channel / model.cfg.head_dim)
        assert layout.rotation[0][0, 0, 0, channel].item() == pytest.approx(
            math.cos(angle), abs=1e-6
        )
    prior = M.GGDPrior(make_model("ggd", True, theta_beta=(0.37,), theta_alpha=(0.0,)).cfg)
    assert prior(1_000_000)[0, 999_999].item() == pytest.approx(-(999_999.0**0.37), rel=1e-5)


def test_attention_starts_as_flat_as_the_papers():
    """s = 1, theta = 0, the 120M model's width. With PyTorch's default for q and k the mean largest
    weight of 512 rows is 0.15 and 0.14; with std n_embd ** -0.5 it would be 0.48 and 0.71."""
    torch.manual_seed(0)
    model = M.GPT(M.ModelConfig(n_layer=2))
    for found in posteriors(model, tokens(512, B=1)):
        assert 0.10 < found.posterior.amax(-1).mean().item() < 0.20


def test_ssmax_on_the_content_alone():
    """Another model than with SSMax on everything; both are those of the float64 reference."""
    idx, found = tokens(14, B=1), []
    for scales in ("content", "posterior"):
        model = make_model("ggd", True, ssmax_scales=scales)
        found.append(model(idx)[0].double())
        expected = reference.forward(model, reference.parameters(model), idx[0].tolist())
        torch.testing.assert_close(found[-1], expected, atol=2e-4, rtol=1e-4)
    assert (found[0] - found[1]).abs().max() > 0.1


def test_beta_is_kept_at_its_least_value():
    model = make_model("ggd", True, theta_beta_min=0.0)
    before = model.prior_values()["theta_beta"]
    model.constrain()
    expected = [[max(beta, 0.0) for beta in layer] for layer in before]
    assert model.prior_values()["theta_beta"] == expected != before
    free = make_model("ggd", True)
    free.constrain()
    assert free.prior_values()["theta_beta"] == before


class StudentPrior(torch.nn.Module):
    """Student's t: b = -(nu + 1) / 2 ln(1 + (d / scale)^2 / nu), with nu and scale as e^theta."""

    takes_ssmax = True

    def __init__(self, cfg, layer=0):
        super().__init__()
        self.theta_nu = torch.nn.Parameter(torch.zeros(cfg.n_head))
        self.register_buffer("theta_scale", torch.linspace(-2.0, 1.0, cfg.n_head))

    def forward(self, n):
        nu, scale = self.theta_nu.exp()[:, None], self.theta_scale.exp()[:, None]
        return -(nu + 1) / 2 * torch.log1p((torch.arange(n) / scale) ** 2 / nu)


def test_a_new_prior_is_a_class_and_an_entry(monkeypatch):
    """Everything else follows: groups, gradients, values, the cache, posteriors."""
    monkeypatch.setitem(M.PRIORS, "student", StudentPrior)
    monkeypatch.setattr(M, "ENCODINGS", (*M.ENCODINGS, "student"))
    model, idx = make_model("student", True), tokens(300)
    assert list(model.prior_values()) == ["theta_nu", "theta_scale", "s"]
    assert len(model.parameter_groups()["theta"]) == model.cfg.n_layer
    model(idx, idx.roll(-1, 1)).backward()
    assert all(block.attn.prior.theta_nu.grad.abs().sum() > 0 for block in model.blocks)
    b, row = model.blocks[0].attn.prior(300), torch.tensor(300.0).log()
    added = model.blocks[0].attn.log_prior(300) * model.blocks[0].attn.ssmax(row)[1]
    torch.testing.assert_close(added, row * model.blocks[0].attn.s[:, None] * b)
    posterior = posteriors(model, idx, torch.tensor([0, 299]))[0]
    assert torch.equal(posterior.prior, posteriors(model, idx)[0].prior[:, :, [0, 299]])
    expected = model(idx).log_softmax(-1)[:, -11:-1].gather(-1, idx[:, -10:, None])[..., 0]
    torch.testing.assert_close(score(model, idx, 10)[0], expected, atol=1e-4, rtol=0)


def test_sinusoidal_table_is_as_large_as_the_embeddings():
    model = M.GPT(M.ModelConfig(n_layer=1, n_embd=128, n_head=4, vocab_size=1000, pe="sinusoidal"))
    table = M.sinusoidal_table(torch.arange(512), 128)
    ratio = table.square().mean().sqrt() / model.embedding.weight.square().mean().sqrt()
    assert ratio.item() == pytest.approx(math.sqrt(0.5), rel=0.02)


def test_initial_weights_follow_the_table():
    cfg = M.ModelConfig(n_layer=8, n_embd=256, n_head=4, vocab_size=1000)
    model = M.GPT(cfg)
    block = model.blocks[3]
    q, k, v = block.attn.qkv.weight.chunk(3)
    for weight in (model.embedding.weight, v, block.mlp.gate_up.weight, model.head.weight):
        assert weight.std().item() == pytest.approx(1 / 16, rel=0.02)
    for weight in (q, k):
        assert weight.std().item() == pytest.approx(1 / 16 / math.sqrt(3), rel=0.02)
    for weight in (block.attn.out.weight, block.mlp.down.weight):
        assert weight.std().item() == pytest.approx(1 / 16 / 4, rel=0.02)
    assert (block.attn.s == 1).all() and (block.attn.prior.theta_beta == 0).all()


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ((0.5,), [[0.5, 0.5], [0.5, 0.5]]),
        ((0.5, -1.0), [[0.5, -1.0], [0.5, -1.0]]),
        ((1.0, 2.0, 3.0, 4.0), [[1.0, 2.0], [3.0, 4.0]]),
    ],
)
def test_thetas_start_alike_or_per_head_or_per_head_and_layer(given, layers):
    model = M.GPT(M.ModelConfig(n_layer=2, n_head=2, n_embd=8, theta_beta=given))
    assert model.prior_values()["theta_beta"] == layers


def test_first_loss_is_near_that_of_a_uniform_guess():
    model = M.GPT(M.ModelConfig(n_layer=2, n_embd=64, n_head=4, vocab_size=257))
    idx = tokens(64, B=4)
    assert abs(model(idx, idx.roll(-1, 1)).item() - math.log(257)) < 1.0


def test_the_120m_model_has_384_prior_parameters():
    with torch.device("meta"):
        groups = M.GPT(M.ModelConfig()).parameter_groups()
    assert sum(p.numel() for p in groups["theta"]) == 384
    assert sum(p.numel() for p in groups["s"]) == 12 * 16
    expected = 50_304 * 768 + 12 * (4 * 768**2 + 3 * 768 * 1536) + 25 * 768
    assert sum(p.numel() for p in groups["matrix"] + groups["norm"]) == expected


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_every_parameter_is_in_one_group_and_gets_a_gradient(pe, ssmax):
    model = make_model(pe, ssmax)
    groups = model.optimizer_groups(lr=1e-3, prior_lr=1e-2, ssmax_lr=2e-2, weight_decay=0.1)
    listed = [p for g in groups for p in g["params"]]
    assert len(listed) == len({id(p) for p in listed}) == len(list(model.parameters()))
    by_name = {g["name"]: g for g in groups}
    assert all(g["weight_decay"] == (0.1 if g["name"] == "matrix" else 0.0) for g in groups)
    present = {
        "matrix": True,
        "norm": True,
        "theta": pe not in ("nope", "sinusoidal", "rope", "alibi"),
        "s": ssmax,
    }
    assert set(by_name) == {name for name, there in present.items() if there}
    assert all(p.dim() == 2 for p in by_name["matrix"]["params"])
    assert all(p.dim() == 1 for p in by_name["norm"]["params"])
    idx = tokens(20)
    model(idx, idx.roll(-1, 1)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in listed)


def test_fixed_theta_is_no_parameter_but_is_saved():
    model = make_model("ggd", True, theta_learned=("alpha",), theta_beta=(1.0,))
    assert len(model.parameter_groups()["theta"]) == model.cfg.n_layer
    assert (model.state_dict()["blocks.0.attn.prior.theta_beta"] == 1).all()
    assert model.prior_values()["theta_beta"] == [[1.0] * 4] * model.cfg.n_layer


def test_prior_and_scale_stay_float32_under_autocast():
    model, idx = make_model("ggd", True), tokens(40)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.blocks[0].attn.log_prior(40).dtype == torch.float32
        assert model.layout(torch.arange(40)[None]).log_n.dtype == torch.float32
        rounded = model(idx, idx.roll(-1, 1))
    rounded.backward()
    assert rounded.item() == pytest.approx(model(idx, idx.roll(-1, 1)).item(), abs=0.05)


def test_loss_in_chunks_is_the_loss(monkeypatch):
    model, idx = make_model("ggd", True), tokens(40)
    targets = idx.roll(-1, 1)
    targets[:, -7:] = -100
    expected = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())
    (expected_gradient,) = torch.autograd.grad(expected, model.head.weight)
    for chunk in (2**26, 13 * model.cfg.padded_vocab):
        monkeypatch.setattr(M, "LOSS_CHUNK", chunk)
        loss = model(idx, targets)
        (gradient,) = torch.autograd.grad(loss, model.head.weight)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_of_the_matrix_products(tied):
    """Counted by torch in a step; attention there multiplies all T keys, causal or not."""
    from torch.utils.flop_counter import FlopCounterMode

    model, T = make_model("rope", True, tie_embeddings=tied), 40
    with FlopCounterMode(display=False) as counter:
        model(tokens(T), tokens(T)).backward()
    masked = 6 * model.cfg.n_layer * model.cfg.n_embd * (2 * T - (T + 1))
    assert counter.get_total_flops() / (2 * T) == model.flops_per_token(T) + masked


def test_padding_of_the_vocabulary_is_never_predicted():
    model = make_model("nope", False, vocab_multiple=64)
    assert model.head.weight.shape[0] == 320 and model(tokens(5)).shape[-1] == 257
    with torch.no_grad():
        model.head.weight[257:] = 100.0
    idx = tokens(30)
    loss = model(idx, idx.roll(-1, 1))
    expected = F.cross_entropy(model(idx).flatten(0, 1), idx.roll(-1, 1).flatten()).item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_positions_in_documents(monkeypatch):
    model, layout, found = make_model("nope", False), M.GPT.layout, []
    monkeypatch.setattr(M.GPT, "layout", lambda *args: found.append(args[1]) or layout(*args))
    model(tokens(6), doc_ids=torch.tensor([[0, 0, 1, 1, 1, 2], [5, 6, 6, 6, 6, 6]]))
    assert found[0].tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]]


def test_slices_of_windows_change_nothing(monkeypatch, float64):
    model, idx = make_model("ggd", True).double(), tokens(24, B=7)
    doc_ids = (idx < 20).cumsum(1)
    expected = model(idx, doc_ids=doc_ids)
    monkeypatch.setattr(M, "CPU_SCORES", 1)
    torch.testing.assert_close(model(idx, doc_ids=doc_ids), expected, atol=1e-10, rtol=0)


def test_checkpoint_round_trip_and_its_errors(tmp_path):
    model = make_model("ggd", True, theta_beta=(1.0, 0.5, -0.5, -1.0))
    checkpoint.save_checkpoint(tmp_path / "last.pt", model.checkpoint() | {"step": 3})
    assert [f.name for f in tmp_path.iterdir()] == ["last.pt"]
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] == 3
    for path in (tmp_path, tmp_path / "last.pt"):
        loaded, saved = checkpoint.load_model(path)
        assert loaded.cfg == model.cfg and saved["step"] == 3 and not loaded.training
        torch.testing.assert_close(loaded(tokens(9)), model(tokens(9)))
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        checkpoint.load_checkpoint(tmp_path / "missing")
    (tmp_path / "bad.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="not a checkpoint"):
        checkpoint.load_checkpoint(tmp_path / "bad.pt")


def test_a_copy_without_the_optimizer_is_the_same_model(run, tmp_path, monkeypatch, capsys):
    saved = checkpoint.load_checkpoint(run)
    checkpoint.save_checkpoint(
        run / "last.pt", saved | {"optimizer": torch.zeros(10**6), "train_config": {"seed": 1}}
    )
    monkeypatch.setattr("sys.argv", ["runs.py", str(run), str(tmp_path / "a" / "copy")])
    checkpoint.main()
    copy = checkpoint.load_checkpoint(tmp_path / "a" / "copy")
    assert copy.keys() == {"model", "model_config", "train_config", "tokenizer", "step"}
    assert all(torch.equal(copy["model"][name], saved["model"][name]) for name in saved["model"])
    assert (tmp_path / "a" / "copy" / "last.pt").stat().st_size < 10**6
    for words, message in (
        ((run,), "got 1 words"),
        (("missing", tmp_path / "b"), "no checkpoint missing"),
        ((run, run), "itself"),
    ):
        monkeypatch.setattr("sys.argv", ["runs.py", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            checkpoint.main()
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_head": 7}, "divisible"),
        ({"pe": "rope", "n_embd": 12, "n_head": 4}, "pairs"),
        ({"n_layer": 0}, "at least 1"),
        ({"theta_beta": (1.0, 2.0)}, "1, 16 or 192"),
        ({"theta_learned": ("gamma",)}, "gamma"),
        ({"pe": "foo"}, "pe is foo"),
    ],
)
def test_config_errors_are_one_sentence(change, message):
    with pytest.raises(ValueError, match=message) as error:
        M.ModelConfig(**change)
    assert "\n" not in str(error.value)
