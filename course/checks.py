"""What the grader asks of each exercise. By hand: pytest -p overlay course/checks.py -k ex3

Every check computes its own truth, in float64 and the slow way. None asks how a body is written.
"""

import cmath
import inspect
import math
import re
import sys

import numpy as np
import pytest
import sheet
import torch

import eval_passkey
import model as M
import needles
import runs
import streaming
from data import get_tokenizer

F64 = torch.float64


def same(got, expected, hint, tolerance=1e-6):
    """Equal to a tolerance, or a message with the first place that differs."""
    got, expected = torch.as_tensor(got), torch.as_tensor(expected)
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, expected {expected.shape}"
    wrong = ~torch.isclose(got.to(F64), expected.to(F64), rtol=tolerance, atol=tolerance)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        pytest.fail(f"at {at}: got {got[at]:.9g}, expected {expected[at]:.9g}. {hint}", False)


# ---- 1. the posterior


def posterior_case(dtype=F64, size=1.0, seed=0):
    """Scores, log-prior, row scale and mask of 2 rows, 3 heads, 4 queries and 6 keys."""
    draw = torch.Generator().manual_seed(seed)
    scores = size * torch.randn(2, 3, 4, 6, generator=draw, dtype=dtype)
    prior = -size * torch.rand(3, 4, 6, generator=draw, dtype=dtype)
    row_scale = 0.5 + torch.rand(1, 1, 4, 1, generator=draw, dtype=dtype)
    keys = torch.arange(6) <= torch.arange(2, 6)[:, None]
    mask = torch.zeros(1, 1, 4, 6, dtype=dtype).masked_fill(~keys, -math.inf)
    return scores, prior, row_scale, mask


def slow_posterior(scores, prior, row_scale, mask):
    """Theorem 1, row by row; sums by math.fsum, ln Z from the largest product."""
    out = [torch.zeros(scores.shape, dtype=F64) for _ in range(3)]
    log_z = torch.zeros(scores.shape[:3], dtype=F64)
    for b, h, i in np.ndindex(*log_z.shape):
        seen = [j for j in range(scores.shape[3]) if mask[0, 0, i, j] == 0]
        content = [float(scores[b, h, i, j]) for j in seen]
        bias = [float(prior[h, i, j] * row_scale[0, 0, i, 0]) for j in seen]

        def logs(x):
            top = max(x)
            return [v - top - math.log(math.fsum(math.exp(u - top) for u in x)) for v in x]

        parts = logs(bias), logs(content), logs([c + p for c, p in zip(content, bias, strict=True)])
        for tensor, values in zip(out, parts, strict=True):
            tensor[b, h, i, seen] = torch.tensor(values, dtype=F64).exp()
        product = [c + p for p, c in zip(*parts[:2], strict=True)]
        top = max(product)
        log_z[b, h, i] = -top - math.log(math.fsum(math.exp(v - top) for v in product))
    return M.Posterior(*out, log_z)


@pytest.mark.parametrize("part", M.Posterior._fields)
def test_ex1_equals_the_definition(part):
    case = posterior_case()
    hint = "the prior is prior * row_scale; masked keys have no part in any normalisation"
    got = getattr(M.reference_posterior(*case), part)
    same(got, getattr(slow_posterior(*case), part), f"{part}: {hint}; float64 stays it", 1e-10)


def test_ex1_without_a_prior_it_is_uniform_on_what_the_mask_leaves():
    scores, _, row_scale, mask = posterior_case()
    got = M.reference_posterior(scores, None, row_scale, mask)
    seen = (mask == 0).to(F64).expand_as(scores)
    same(got.prior, seen / seen.sum(-1, keepdim=True), "None stands for b = 0")
    same(got.log_z, seen.sum(-1).log(), "ln Z = ln n if one of the two is uniform")
    same(got.posterior, got.content, "a uniform prior changes nothing")


@pytest.mark.parametrize("size", [200.0, 3000.0])
def test_ex1_stays_finite_where_content_and_prior_fight(size):
    """In float32 the product of the two factors underflows."""
    scores = torch.tensor([[[[0.0, -size]]]])
    case = scores, torch.tensor([[[-size, 0.0]]]), torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 2)
    got = M.reference_posterior(*case)
    for name, value in got._asdict().items():
        assert value.isfinite().all(), f"{name} is {value.tolist()}: stay in logarithms"
    same(got.posterior.sum(-1), torch.ones(1, 1, 1), "a posterior sums to 1")
    same(got.posterior[0, 0, 0], torch.tensor([0.5, 0.5]), "both are equally likely")
    same(got.log_z, torch.full((1, 1, 1), size - math.log(2)), "ln Z = disagreement - ln 2", 1e-5)


def test_ex1_every_part_is_normalised_and_z_at_least_1():
    got = M.reference_posterior(*posterior_case(torch.float32, 9.0, 4))
    for name in ("prior", "content", "posterior"):
        same(getattr(got, name).sum(-1), torch.ones(2, 3, 4), f"{name} sums to 1", 1e-5)
    assert (got.log_z > -1e-6).all(), "Z is at least 1: its inverse is an average of probabilities"
    product = got.prior * got.content * got.log_z.exp()[..., None]
    same(product, got.posterior, "posterior = prior * content * Z", 1e-4)


def test_ex1_gradients_reach_scores_and_prior():
    scores, prior, row_scale, mask = posterior_case()
    scores.requires_grad_(), prior.requires_grad_()
    got = M.reference_posterior(scores, prior, row_scale, mask)
    assert got.posterior.requires_grad and got.log_z.requires_grad, "something is detached"
    (got.posterior[..., 0].sum() + got.log_z.sum()).backward()
    for name, tensor in (("scores", scores), ("prior", prior)):
        assert tensor.grad is not None, f"{name} gets no gradient: is it detached?"
        assert tensor.grad.isfinite().all() and tensor.grad.abs().sum() > 0, f"{name}: bad gradient"


# ---- 2. ALiBi


SLOPES = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    8: [2**-h for h in range(1, 9)],
    16: [2 ** (-h / 2) for h in range(1, 17)],
    3: [2**-4, 2**-8, 2**-2],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    12: [*(2**-h for h in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}


@pytest.mark.parametrize("n_head", SLOPES)
def test_ex2_slopes(n_head):
    got = M.alibi_slopes(n_head)
    assert got.dtype == torch.float32, f"{got.dtype}, expected torch.float32"
    same(got, torch.tensor(SLOPES[n_head]), "2^(-8 h / H); other H: see model.py's docstring")


def alibi(n_head):
    return M.AlibiPrior(M.ModelConfig(pe="alibi", n_head=n_head, n_embd=2 * n_head))


@pytest.mark.parametrize(("n_head", "n"), [(4, 1), (4, 4), (8, 300), (6, 7)])
def test_ex2_prior_falls_linearly(n_head, n):
    prior = alibi(n_head)
    slopes = torch.rand(n_head)  # whatever the slopes are
    prior.slopes = slopes
    expected = [[-float(m) * d for d in range(n)] for m in slopes]
    same(prior(n), torch.tensor(expected), "b = -m |d|: 0 at the own token, then less and less")


def test_ex2_lemma_2_and_3():
    prior = alibi(4)
    b = prior(2000).double()
    p = b.softmax(-1)
    for h, m in enumerate([2**-2, 2**-4, 2**-6, 2**-8]):
        same(p[h, 1] / p[h, 0], math.exp(-m), "Lemma 2: each token further is e^-m as likely")
        assert p[h, 101:].sum() <= math.exp(-m * 101) * (1 + 1e-5), "Lemma 3: mass beyond 100"


def test_ex2_ssmax_multiplies_the_content_only():
    cfg = M.ModelConfig(pe="alibi", n_head=4, n_embd=8)
    attn = M.CausalSelfAttention(cfg)
    with torch.no_grad():
        attn.s.fill_(3.0)
    expected = -torch.tensor([[2.0 ** (-2 * h)] for h in range(1, 5)]) * torch.arange(9)
    same(attn.log_prior(9), expected, "takes_ssmax stays false: Lemma 3 counts on it")
    same(attn.ssmax(torch.ones(1, 1, 1, 1))[1], torch.ones(1, 1, 1, 1), "no row scale for ALiBi")


# ---- 3. and 4. the generalized Gaussian


def ggd(alpha, beta, mu=None, learned=("alpha", "beta", "mu")):
    cfg = M.ModelConfig(n_head=len(alpha), n_embd=2 * len(alpha), n_layer=1, theta_learned=learned)
    prior = M.GGDPrior(cfg)
    with torch.no_grad():
        for name, values in (("alpha", alpha), ("beta", beta), ("mu", mu or [0.0] * len(alpha))):
            getattr(prior, f"theta_{name}").copy_(torch.tensor(values))
    return prior


def slow_ggd(alpha, beta, mu, n):
    """(b, db/dtheta_alpha, db/dtheta_beta, db/dtheta_mu), each (H, n) float64."""
    out = torch.zeros(4, len(alpha), n, dtype=F64)
    thetas = zip(*np.float32([alpha, beta, mu]).tolist(), strict=True)
    for h, (a, b, m) in enumerate(thetas):
        for i in range(n):
            offset = -i - (math.exp(m) - math.exp(-m))
            base = abs(offset) + M.EPSILON
            x = a + b * math.log(base)
            e = math.exp(min(x, M.MAX_EXPONENT))
            dmu = -(b / base) * math.copysign(1.0, offset) * (math.exp(m) + math.exp(-m))
            dmu = 0.0 if offset == 0 else dmu
            value = -e if x <= M.MAX_EXPONENT else -e * (1 + x - M.MAX_EXPONENT)
            slopes = [-e, -e * math.log(base), -e * dmu]
            out[:, h, i] = torch.tensor([value, *slopes], dtype=F64)
    return out


SHAPES = {
    "local": ([0.3, -1.0, -8.0], [1.0, 2.0, 4.0], [0.0, 0.0, 0.0]),
    "heavy tail": ([0.0, 1.5, -0.5], [0.5, 0.1, 0.9], [0.0, 0.0, 0.0]),
    "uniform": ([0.0, 2.0, -3.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    "anti-local": ([0.0, 1.0, -2.0], [-0.6, -1.0, -2.0], [0.0, 0.0, 0.0]),
    "mu": ([0.0, -1.0, 0.5], [1.0, 2.0, -0.5], [-2.0, -1.3, 1.1]),
    "one key less than heads": ([0.1, 0.2, 0.3], [1.1, -0.2, 0.3], [0.4, 0.0, -0.7]),
}


def check_values(shape, n):
    alpha, beta, mu = SHAPES[shape]
    hint = "b = -e^theta_alpha (|d - mu| + EPSILON)^beta, d = 0, -1, ...; mu = e^tm - e^-tm"
    same(ggd(alpha, beta, mu)(n), slow_ggd(alpha, beta, mu, n)[0], f"{hint}, in float64", 1e-10)


def check_gradients(shape, n, tolerance=1e-5):
    theta = SHAPES[shape]
    prior, truth = ggd(*theta), slow_ggd(*theta, n)
    weights = torch.linspace(0.5, 1.5, n, dtype=F64).repeat(len(theta[0]), 1)
    (prior(n).double() * weights).sum().backward()
    for name, derivative in zip(("alpha", "beta", "mu"), truth[1:], strict=True):
        got = getattr(prior, f"theta_{name}").grad
        assert got is not None, f"theta_{name} gets no gradient: is it detached, or unused?"
        same(got, (derivative * weights).sum(1), f"dLoss/dtheta_{name} is wrong", tolerance)


def check_extremes():
    """theta as training may leave it: nothing infinite, and farther keys stay less likely."""
    alpha = [40.0, 20.0, 0.0, 0.0, -20.0, 1e4, 0.0, 0.0]
    beta = [4.0, 10.0, -10.0, -4.0, 10.0, 0.0, 1e4, -1e4]
    prior, truth = ggd(alpha, beta), slow_ggd(alpha, beta, [0.0] * 8, 400)
    b = prior(400)
    assert b.isfinite().all(), "b is inf or NaN at extreme theta: clamp the exponent x at the top"
    above = truth[0] < -math.exp(M.MAX_EXPONENT)
    hint = "x is at most MAX_EXPONENT here: float64, EPSILON added, theta as it is?"
    same(b.where(~above, truth[0]), truth[0], hint, 1e-10)
    same(b, truth[0], "above MAX_EXPONENT the tangent replaces e^x, so that order is kept", 1e-5)
    b.sum().backward()
    for name, derivative in zip(("alpha", "beta", "mu"), truth[1:], strict=True):
        grad = getattr(prior, f"theta_{name}").grad
        assert grad is not None, f"theta_{name} gets no gradient"
        assert grad.isfinite().all(), f"dLoss/dtheta_{name} is {grad.tolist()}: inf or NaN"
        same(grad, derivative.sum(1), f"the tangent has a gradient too (theta_{name})", 1e-4)


def check_uniform_start():
    prior = ggd([0.0, 1.0], [0.0, 0.0])
    same(prior(50), -torch.tensor([[1.0], [math.e]]).expand(2, 50), "beta = 0: b = -e^theta_alpha")


def check_large_theta_mu():
    prior = ggd([0.0, 0.0], [1.0, 0.5], [1000.0, -1000.0])
    b = prior(5)
    assert b.isfinite().all(), "theta_mu = 1000: e^theta_mu overflows; clamp it at MAX_EXPONENT"
    b.sum().backward()
    hint = "beyond its clamp theta_mu changes nothing: its gradient is 0"
    same(prior.theta_mu.grad, torch.zeros(2), hint)


def check_size_and_format():
    for n in (1, 2, 777):
        b = ggd([0.0, 1.0], [1.0, -1.0])(n)
        assert b.shape == (2, n), f"shape {tuple(b.shape)}, expected (H, n) = {(2, n)}"
        assert b.dtype == F64, f"{b.dtype}, expected float64: large b differ by little"


def check_fixed_parameters():
    prior = ggd([0.5, 0.1], [1.0, -0.3], learned=("alpha",))
    prior(20).sum().backward()
    assert prior.theta_alpha.grad is not None and prior.theta_beta.grad is None, (
        "theta_alpha is learned and must get a gradient; theta_beta is fixed"
    )


GGD_CHECKS = {
    **{f"values, {s}": lambda s=s: check_values(s, 2 if "less" in s else 40) for s in SHAPES},
    **{f"gradients, {s}": lambda s=s: check_gradients(s, 30) for s in SHAPES},
    "extremes": check_extremes,
    "uniform start": check_uniform_start,
    "large theta_mu": check_large_theta_mu,
    "size and format": check_size_and_format,
    "fixed parameters": check_fixed_parameters,
}


@pytest.mark.parametrize("check", GGD_CHECKS)
def test_ex3_ggd(check):
    GGD_CHECKS[check]()


@pytest.mark.parametrize("check", GGD_CHECKS)
def test_ex4_ggd(check):
    own_derivatives()
    GGD_CHECKS[check]()


def own_derivatives():
    node = ggd([0.1, 0.2], [1.0, -1.0])(9).grad_fn
    waiting, kinds = [node], set()
    while waiting:
        if (node := waiting.pop()) is not None:
            kinds.add(type(node))
            waiting += [following for following, _ in node.next_functions]
    own = [k for k in kinds if issubclass(k, torch.autograd.function.BackwardCFunction)]
    assert own, "no torch.autograd.Function of yours is in the graph"
    names = ", ".join(sorted(k.__name__ for k in kinds))
    known = {"ExpBackward0", "PowBackward0", "PowBackward1", "LogBackward0", "AbsBackward0"}
    assert not known & {k.__name__ for k in kinds}, f"torch still differentiates for you: {names}"


# ---- 5. RoPE


@pytest.mark.parametrize(("channels", "base"), [(8, 500_000.0), (32, 500_000.0), (6, 10_000.0)])
def test_ex5_angles(channels, base):
    positions = torch.tensor([[0, 1, 2, 77], [5, 4, 1000, 31]])
    expected = [
        [[t * base ** (-2 * i / channels) for i in range(channels // 2)] for t in row]
        for row in positions.tolist()
    ]
    got = M.angles(positions, channels, base)
    same(got, torch.tensor(expected, dtype=F64), "position * base^(-2 i / channels)", 1e-12)


def test_ex5_angles_are_exact_far_out():
    got = M.angles(torch.tensor([999_983, 2**24 + 1]), 32, 500_000.0)
    expected = [[t * 500_000.0 ** (-i / 16) for i in range(16)] for t in (999_983, 2**24 + 1)]
    error = (got.double() - torch.tensor(expected, dtype=F64)).abs().max().item()
    assert error < 1e-8, f"off by {error:.1e} radians far out: which number format are they in?"


def slow_rotation(x, angle):
    """Channels i and i + D/2 as a complex number, turned by its angle."""
    out, half = torch.zeros_like(x, dtype=F64), x.shape[-1] // 2
    for b, h, t, i in np.ndindex(*x.shape[:3], half):
        z = complex(x[b, h, t, i], x[b, h, t, i + half]) * cmath.exp(1j * float(angle[b, t, i]))
        out[b, h, t, i], out[b, h, t, i + half] = z.real, z.imag
    return out


def test_ex5_rotation():
    x, angle = torch.randn(2, 3, 4, 6, dtype=F64), 7 * torch.rand(2, 4, 3, dtype=F64)
    got = M.rotate(x.float(), angle.cos().float()[:, None], angle.sin().float()[:, None])
    hint = "channels i and i + D/2 are the real and imaginary part; the turn is e^{+i angle}"
    same(got, slow_rotation(x, angle), hint, 1e-5)


def test_ex5_only_the_distance_counts():
    q, k = torch.randn(2, 1, 1, 1, 32)

    def score(t, u):
        turned = []
        for x, at in ((q, t), (k, u)):
            angle = M.angles(torch.tensor([[at]]), 32, M.ROPE_THETA)[:, None]
            turned.append(M.rotate(x, angle.cos().float(), angle.sin().float()))
        return (turned[0] * turned[1]).sum()

    for shift in (1, 1000, 900_000):
        same(score(40 + shift, 7 + shift), score(40, 7), f"shifted by {shift}", 1e-4)
    assert abs(score(40, 7) - score(40, 8)) > 1e-4, "the score ignores the distance"


def test_ex5_rotation_keeps_size_and_number_format():
    x, angle = torch.randn(1, 2, 5, 8).bfloat16(), torch.rand(1, 1, 5, 4)
    got = M.rotate(x, angle.cos(), angle.sin())
    assert got.dtype == torch.bfloat16, f"{got.dtype}, expected x's: bfloat16"
    exact = slow_rotation(x.float(), angle[0])
    same(got, exact.bfloat16(), "rotate in float32, and round once at the end", 2e-3)


def test_ex5_the_model_rotates_with_yours():
    torch.manual_seed(0)
    cfg = M.ModelConfig(vocab_size=7, n_layer=1, n_head=2, n_embd=16, pe="rope", ssmax=False)
    net = M.GPT(cfg)
    idx = torch.tensor([[1, 2, 3, 4, 2, 1]])
    attn = net.blocks[0].attn
    x = net.blocks[0].norm_attn(net.embed(idx, torch.arange(6)[None]))
    q, k, _ = attn.project(x, net.layout(torch.arange(6)[None]))
    raw = attn.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    angle = torch.arange(6, dtype=F64)[None, :, None] * 500_000.0 ** (-torch.arange(4) / 4.0)
    same(q, slow_rotation(raw[0], angle) / math.sqrt(8), "q of a RoPE model", 1e-4)
    same(k, slow_rotation(raw[1], angle), "k of a RoPE model", 1e-4)


# ---- 6. SSMax


def attention(pe, ssmax, **changes):
    torch.manual_seed(0)
    cfg = M.ModelConfig(n_layer=1, n_head=3, n_embd=24, pe=pe, ssmax=ssmax, **changes)
    attn = M.CausalSelfAttention(cfg)
    if ssmax:
        with torch.no_grad():
            attn.s.copy_(torch.tensor([0.3, 1.0, -0.7]))
    return attn


def layout_of(n, rotation=None):
    n = torch.tensor([n])
    return M.Layout(n, n.float().log()[:, None, :, None], rotation)


CASES = [("nope", False), ("nope", True), ("rope", False), ("rope", True), ("alibi", True)]
CASES += [("ggd", True), ("ggd", False)]


@pytest.mark.parametrize(("pe", "ssmax"), CASES)
def test_ex6_project(pe, ssmax):
    attn, n = attention(pe, ssmax), [1, 2, 3, 4, 2, 9]
    x = torch.randn(2, 6, 24)
    angle = 5 * torch.rand(1, 6, 4, dtype=F64)
    rotation = (angle.cos().float()[:, None], angle.sin().float()[:, None])
    got = attn.project(x, layout_of(n, rotation if pe == "rope" else None))
    raw = (x.double() @ attn.qkv.weight.double().T).reshape(2, 6, 3, 3, 8)
    q, k, v = (raw[:, :, part].transpose(1, 2) for part in range(3))
    if pe == "rope":
        q, k = slow_rotation(q, angle.expand(2, 6, 4)), slow_rotation(k, angle.expand(2, 6, 4))
    factor = torch.ones(3, 6, dtype=F64)
    if ssmax:
        factor = torch.tensor([0.3, 1.0, -0.7])[:, None] * torch.tensor(n, dtype=F64).log()
    for name, value, truth in (
        ("q", got[0], q * factor[:, :, None] / math.sqrt(8)),
        ("k", got[1], k),
        ("v", got[2], v),
    ):
        hint = "q is multiplied by 1/sqrt(D), and by s ln n of its own row with SSMax; k and v not"
        same(value, truth, f"{name}: {hint}", 2e-5)


def test_ex6_gradients_reach_s_and_the_weights():
    attn = attention("ggd", True)
    q, k, v = attn.project(torch.randn(1, 4, 24), layout_of([1, 2, 3, 4]))
    (q.sum() + k.sum() + v.sum()).backward()
    for name, tensor in (("s", attn.s), ("qkv", attn.qkv.weight)):
        assert tensor.grad is not None, f"{name} gets no gradient: is it detached?"
        assert tensor.grad.abs().sum() > 0, f"the gradient of {name} is 0"


def test_ex6_number_format_under_autocast():
    attn = attention("rope", True)
    angle = torch.rand(1, 1, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        parts = attn.project(torch.randn(1, 4, 24), layout_of([1, 2, 3, 4], (angle, angle)))
    got = {name: part.dtype for name, part in zip("qkv", parts, strict=True)}
    assert set(got.values()) == {torch.bfloat16}, f"{got}: all must leave in the layer's format"


def test_ex6_a_key_above_all_others_does_not_fade():
    """g nats above n - 1 equal keys: n^(s g) / (n^(s g) + n - 1)."""
    attn = attention("nope", True)
    with torch.no_grad():
        attn.qkv.weight.zero_()
        for part in range(2):  # q and k: the first channel of x, in every head
            attn.qkv.weight[part * 24 :: 8][:3, 0] = 1.0
    for n in (16, 512):
        x = torch.zeros(1, n, 24)
        x[0, 0, 0], x[0, -1, 0] = 1.5 * math.sqrt(8), 1.0  # g = 1.5
        q, k, _ = attn.project(x, layout_of(list(range(1, n + 1))))
        weight = (q[0, 1, -1] @ k[0, 1].T).softmax(-1)
        small = n ** (1 / math.sqrt(8))  # the last key meets itself
        expected = n**1.5 / (n**1.5 + small + n - 2)
        same(weight[0], expected, f"weight of the key at n = {n}, s = 1, g = 1.5", 1e-4)


def test_ex6_what_follows_changes_nothing():
    torch.manual_seed(1)
    net = M.GPT(M.ModelConfig(vocab_size=11, n_layer=2, n_head=2, n_embd=16)).eval()
    idx = torch.randint(11, (1, 12))
    same(net(idx[:, :7]), net(idx)[:, :7], "a query's n is its own, not the last one's", 1e-4)


# ---- 7. a prompt of exactly n tokens

BYTES = get_tokenizer("bytes")
WORDING = needles.WORDINGS["passkey"]
GREEN = needles.FILLERS["passkey"]
ODD = "Ein Übel: naïve café, 東京の空.\nSecond line; more words here, and 42 of them. "


def make_prompt(length, depth=0.5, key=12345, filler=GREEN, description="", wording=WORDING):
    return needles.passkey_prompt(BYTES, length, depth, key, wording, filler, description)


@pytest.mark.parametrize("length", [181, 182, 200, 256, 1023, 1024, 4099])
@pytest.mark.parametrize("filler", [GREEN, ODD, "abcdefghij" * 9], ids=["words", "odd", "no space"])
def test_ex7_lengths_are_exact(length, filler):
    for depth in (0, 0.31, 1):
        prompt = make_prompt(length, depth, filler=filler)
        assert len(prompt.tokens) == length, f"{len(prompt.tokens)} tokens, expected {length}"


@pytest.mark.parametrize("depth", [0, 0.1, 0.5, 0.83, 1])
def test_ex7_the_needle_stands_at_its_depth_between_words(depth):
    prompt = make_prompt(4096, depth)
    assert prompt.tokens[0] == BYTES.eot_token, "a document begins with <|endoftext|>"
    text = BYTES.decode(prompt.tokens[1:])
    needle = WORDING.needle.format(key=12345)
    assert text.count(needle) == 1, "the needle must be there once"
    before, after = text.split(needle)
    end = f"{WORDING.question} 12345"
    assert after.endswith(end), f"it must end with {end!r}, got {after[-60:]!r}"
    after = after.removesuffix(end).strip()
    filler = len(before) + len(after)
    assert abs(len(before) / filler - depth) < 0.02, f"at {len(before) / filler:.2f}, not {depth}"
    assert abs(prompt.depth - depth) < 0.02, f"Prompt.depth is {prompt.depth}, expected {depth}"
    assert not before or not after or before.endswith(" "), (
        f"cut inside a word: ...{before[-20:]!r}"
    )
    assert GREEN.strip()[:20] in before + after, "the filler is missing"


def test_ex7_the_answer_is_counted_with_its_space():
    for key in (12345, 987, 12345678):
        prompt = make_prompt(400, key=key)
        got, expected = prompt.answer, len(f" {key}")
        assert got == expected, f"answer {got} tokens, expected {expected}: ' {key}' in bytes"
        assert BYTES.decode(prompt.tokens[-expected:]) == f" {key}"


def test_ex7_description_and_other_wordings():
    wording = needles.WORDINGS["vault"]
    prompt = make_prompt(700, 0.4, description=needles.DESCRIPTION, wording=wording)
    text = BYTES.decode(prompt.tokens[1:])
    assert text.startswith(needles.DESCRIPTION), "the description comes before everything else"
    assert len(prompt.tokens) == 700 and "12345 opens the vault." in text
    assert text.endswith("The vault is opened by 12345")


def test_ex7_a_long_prompt_takes_few_encodings(monkeypatch):
    calls, encode = [], needles.encode_document

    def counted(*words):
        calls.append(1)
        assert len(calls) <= 40, "more than 40 calls of encode_document: search by the slope"
        return encode(*words)

    for module in {needles, inspect.getmodule(needles.passkey_prompt)}:
        if hasattr(module, "encode_document"):
            monkeypatch.setattr(module, "encode_document", counted)
    prompt = make_prompt(2**17, 0.3, filler=ODD)  # in which a character is up to three tokens
    assert len(prompt.tokens) == 2**17 and abs(prompt.depth - 0.3) < 1e-3
    assert len(calls) <= 10, f"{len(calls)} calls of encode_document, expected at most 10"


def test_ex7_too_short_a_length_says_what_it_needs():
    needs = needles.shortest_prompt(BYTES, 12345, WORDING)
    with pytest.raises(ValueError, match=f"at least {needs}"):
        make_prompt(needs - 1)
    assert len(make_prompt(needs).tokens) == needs, "the shortest prompt has no filler at all"


# ---- 8. answers and intervals


def slow_wilson(correct, n, z):
    """Both ends by bisection of the definition."""

    def inside(p):
        return abs(p - correct / n) <= z * math.sqrt(p * (1 - p) / n)

    ends = []
    for far in (0.0, 1.0):
        near = correct / n
        for _ in range(60):
            middle = (near + far) / 2
            near, far = (middle, far) if inside(middle) else (near, middle)
        ends.append(near)
    return ends


@pytest.mark.parametrize("z", [1.96, 1.0, 2.576])
@pytest.mark.parametrize(("correct", "n"), [(0, 1), (1, 1), (0, 20), (20, 20), (57, 60), (7, 50)])
def test_ex8_wilson(correct, n, z):
    low, high = runs.wilson(correct, n, z)
    same([low, high], slow_wilson(correct, n, z), "p, not correct / n, stands under the root")
    assert 0 <= low <= high <= 1, f"{low}, {high}: a probability lies between 0 and 1"


def test_ex8_wilson_uses_95_percent_by_itself():
    same(runs.wilson(13, 20), slow_wilson(13, 20, 1.96), "z is 1.96 if none is given")


def prompts_of(answers, T=30):
    rng = np.random.default_rng(0)
    return [needles.Prompt(rng.integers(0, 50, T).tolist(), a, 0.5) for a in answers]


ANSWERS = [2, 5, 3, 5, 1, 4, 2]


def test_ex8_every_token_of_an_answer_counts_and_no_other():
    prompts = prompts_of(ANSWERS)
    for place in range(-6, 0):

        def scorer(tokens, n_last, place=place):
            best = torch.tensor(tokens[len(tokens) - n_last :])
            if -place <= n_last:
                best[place] += 1
            return best

        got = list(map(bool, eval_passkey.find_answers(scorer, prompts)))
        expected = [a < -place for a in ANSWERS]
        assert got == expected, f"a wrong token {-place} from the end: {got}, expected {expected}"


def test_ex8_the_scorer_is_asked_for_the_answer_alone():
    asked = []

    def scorer(tokens, n_last):
        asked.append((len(tokens), n_last))
        return torch.tensor(tokens[-n_last:])

    got = eval_passkey.find_answers(scorer, prompts_of(ANSWERS))
    assert got == [True] * 7, f"an oracle gets all answers right, got {got}"
    expected = [(30, a) for a in ANSWERS]
    assert asked == expected, f"the scorer saw (tokens, n_last) {asked}, expected {expected}"


def test_ex8_a_constant_finds_nothing():
    got = eval_passkey.find_answers(lambda _, n: torch.full((n,), 99), prompts_of(ANSWERS))
    assert got == [False] * 7, f"no token is ever right here, got {got}"


# ---- 10. a prior of your own


def own_model():
    torch.manual_seed(0)
    shape = {"vocab_size": 31, "n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 64}
    return M.GPT(M.ModelConfig(pe="mine", **shape, tie_embeddings=False)).eval()


def test_ex10_shape_and_values():
    for n in (1, 2, 300):
        b = M.PRIORS["mine"](own_model().cfg, 1)(n)
        assert b.shape == (4, n), f"shape {tuple(b.shape)}, expected (H, n) = {(4, n)}"
        assert not b.isnan().any() and (b.max(-1).values < math.inf).all(), "NaN or +inf in b"
    assert M.PRIORS["mine"](own_model().cfg, 0)(2**20).isfinite().all(), "at a million tokens"


def test_ex10_a_distance_has_one_value_at_every_n():
    prior = M.PRIORS["mine"](own_model().cfg, 0)
    difference = prior(300)[:, :100].double() - prior(100).double()  # softmax sees no constant
    expected = difference[:, :1].expand(4, 100)
    same(difference, expected, "forward(n) must give each distance the same value at every n")


def test_ex10_learns_with_at_most_four_numbers_a_head_and_one_start():
    net = own_model().train()
    idx = torch.randint(31, (2, 33), generator=torch.Generator().manual_seed(1))
    net(idx[:, :-1], idx[:, 1:]).backward()
    own = dict(net.blocks[1].attn.prior.named_parameters())
    assert own, "a prior without a parameter learns nothing"
    assert sum(p.numel() for p in own.values()) <= 16, "more than four numbers a head"
    for name, p in own.items():
        assert name.startswith("theta_") and p.shape == (4,), f"{name}: (H,), named theta_..."
        assert p.grad is not None and p.grad.isfinite().all(), f"{name} gets no finite gradient"
        assert (p == p[0]).all(), f"{name} begins differently in different heads"


def test_ex10_at_most_40_lines():
    source = inspect.getsource(M.PRIORS["mine"]).strip().splitlines()
    assert len(source) <= 40, f"{len(source)} lines"


def test_ex10_long_texts_are_read_as_short_ones():
    """streaming.py skips what the prior hides: the same logits, in one piece and from a cache."""
    net = own_model()
    idx = torch.randint(31, (1, 700), generator=torch.Generator().manual_seed(2))
    cache = streaming.KVCache(net, 1, 700)
    same(streaming.prefill(net, idx, cache, 9), net(idx)[:, -9:], "forward(n) depends on n?", 1e-4)


# ---- the numbers of the sheet


def pytest_generate_tests(metafunc):
    if "question" in metafunc.fixturenames:
        mine = sys.modules.get("mine")
        asked = sheet.questions(getattr(mine, "NAME", "")) if mine else []
        ids = [re.sub(r"(\d+)", r"ex\1_", q.key) for q in asked]
        metafunc.parametrize("question", asked, ids=ids)


def test_number(question):
    mine = sys.modules["mine"]
    assert getattr(mine, "NAME", ""), "NAME is empty: it says which sheet is yours"
    answers = getattr(mine, "ANSWERS", {})
    assert question.key in answers, f"ANSWERS has no {question.key!r}: {question.text}"
    got, expected = answers[question.key], question.truth()
    assert isinstance(got, int | float), f"{question.key} is {got!r}; it must be a number"
    near = abs(got - expected) <= max(question.near * abs(expected), question.slack, 1e-9)
    hint = f"{question.text} (sheet of {mine.NAME!r})"
    assert near, f"{question.key}: got {got}, which is not it. {hint}"
