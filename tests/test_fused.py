"""The fused attention against the explicit one: forward on a CPU, values and gradients on CUDA."""

import itertools
import math
import shutil

import pytest
import reference
import torch
from conftest import ENCODINGS, make_model, posteriors

import model as M

# of logits of size 1: float32 makes up to 1e-5; a wrong n, distance or mask at least 1e-2
ATOL = 2e-4
needed = torch.backends.cpu.get_cpu_capability().startswith("AVX") and (
    shutil.which("g++") or shutil.which("clang++")
)
compiler = pytest.mark.skipif(
    not needed, reason="FlexAttention on a CPU needs AVX2 and a C++ compiler"
)


def tokens(T, B=2):
    return torch.randint(0, 256, (B, T), generator=torch.Generator().manual_seed(0))


def documents(T, B=2):
    """Three documents a row, cut elsewhere in each; the last is longer than a block of the mask."""
    cuts = torch.tensor([[T // 9 + 3 * b, T // 3 - 5 * b] for b in range(B)])
    return (torch.arange(T)[None, :, None] >= cuts[:, None]).sum(-1)


@pytest.fixture(autouse=True)
def float32_products():
    """Where other settings would round float32 matrix products to TensorFloat32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@compiler
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_fused_forward_equals_reference_on_a_cpu(pe, ssmax, packed):
    model, idx = make_model(pe, ssmax, n_embd=64), tokens(200)
    doc_ids = documents(200) if packed else None
    virtual = torch.tensor([0.0, 2.0]) if ssmax else None  # a virtual length in the second row
    with torch.no_grad():
        expected = model(idx, doc_ids=doc_ids, log_virtual=virtual)
        model.attention = "fused"
        got = model(idx, doc_ids=doc_ids, log_virtual=virtual)
    assert not torch.equal(got, expected), "this was the reference twice"
    torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)


@compiler
@pytest.mark.parametrize("s", [None, 0.3, -0.3])
def test_fused_forward_with_extreme_priors(s):
    thetas = {"theta_alpha": (0.5,), "theta_beta": (-2.0, -5.0, -1.0, 3.0)}
    model, idx = make_model("ggd", s is not None, n_embd=64, **thetas), tokens(200)
    for block in model.blocks if s is not None else ():
        torch.nn.init.constant_(block.attn.s, s)
    with torch.no_grad():
        expected = model(idx)
        model.attention = "fused"
        torch.testing.assert_close(model(idx), expected, atol=ATOL, rtol=0)


GRID = list(
    itertools.product(
        (-20, -3, 0, 3, 9.57, 12, 15, 40), (-4, -2, -0.6, -0.1, 0, 0.1, 1, 4, 10), (0, -2.4)
    )
)
GRID += [(alpha, 0, mu) for alpha in (0, 12, 40) for mu in (90, -90)]  # mu beyond float32


@pytest.mark.parametrize("s", [None, 0.3, -0.3])
@pytest.mark.parametrize("attention", ["reference", pytest.param("fused", marks=compiler)])
def test_attention_equals_float64_wherever_theta_may_go(attention, s):
    """A head for each theta_alpha, theta_beta and theta_mu; content of some nats, as if trained."""
    H, D, T = len(GRID), 8, 150
    thetas = dict(
        zip(("theta_alpha", "theta_beta", "theta_mu"), zip(*GRID, strict=True), strict=True)
    )
    shape = {"n_layer": 1, "n_head": H, "n_embd": D * H, "vocab_size": 2, "ssmax": s is not None}
    attn = M.CausalSelfAttention(M.ModelConfig(**shape, ssmax_init=s or 1.0, **thetas))
    log_n = torch.arange(1, T + 1, dtype=torch.float64).log()[:, None]  # (T, 1)
    scale = torch.ones(T, 1) if s is None else attn.s[0].double().detach() * log_n
    q, k, v = torch.randn(3, 1, H, T, D, generator=torch.Generator().manual_seed(0))
    q = (q * scale).float()
    p = {
        f"blocks.0.attn.prior.{name}": torch.tensor(values).double()
        for name, values in thetas.items()
    }
    distance = torch.arange(T, dtype=torch.float64)[:, None] - torch.arange(T)
    priors = [reference.log_prior(attn.cfg, p, 0, h, distance.abs()) for h in range(H)]
    prior = (torch.stack(priors) * scale).masked_fill(distance < 0, -math.inf)
    prior = prior - prior.amax(-1, keepdim=True)
    expected = (q[0].double() @ k[0].double().transpose(1, 2) + prior).softmax(-1) @ v[0].double()
    blocks = M.visible_blocks(T, None, None, q.device)
    layout = M.Layout(
        torch.arange(1, T + 1)[None], log_n.float()[None, None], None, attention, blocks
    )
    _, row_scale = attn.ssmax(layout.log_n)
    with torch.no_grad():
        got = M.ATTENTIONS[attention](q, k, v, attn.log_prior(T), row_scale, layout)[0]
    errors = (got.double() - expected).abs().amax((1, 2))
    worst = int(errors.argmax())
    assert errors.isfinite().all() and errors[worst] < 2e-4, (
        f"{errors[worst]:.1e} at theta = {GRID[worst]}"
    )


@compiler
def test_fused_with_a_window_and_in_bfloat16_on_a_cpu():
    torch.compiler.reset()  # the encodings used up the variants that a function may be compiled for
    model, idx = make_model("rope", False, n_embd=64), tokens(200)
    with torch.no_grad():
        model.window = 20
        expected = model(idx)
        model.attention = "fused"
        torch.testing.assert_close(model(idx), expected, atol=ATOL, rtol=0)
        with torch.autocast("cpu", torch.bfloat16):
            error = (model(idx) - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.1  # bfloat16 makes 0.013, a window of 19 or 21 0.3


def test_block_mask_hides_what_the_dense_mask_hides():
    doc_ids, device, model = documents(300), torch.device("cpu"), make_model("nope", False)
    for ids, window in itertools.product((None, doc_ids), (None, 7)):
        blocks = M.visible_blocks(300, ids, window, device)
        b, i, j = torch.arange(2)[:, None, None], torch.arange(300)[:, None], torch.arange(300)
        hidden = ~blocks.mask_mod(b, torch.tensor(0), i, j).expand(2, 300, 300)
        model.window = window
        positions = torch.arange(300)[None]
        if ids is not None:
            positions = positions - (ids[:, :, None] > ids[:, None, :]).sum(-1)
        dense = M.visible(model.layout(positions).n, i - j).expand(2, 1, 300, 300)[:, 0]
        assert torch.equal(hidden, dense == -torch.inf)
        computed = blocks.to_dense().bool()[:, 0].repeat_interleave(128, 1)
        computed = computed.repeat_interleave(128, 2)[:, :300, :300]
        assert not (~computed & ~hidden).any(), "a block with visible keys is left out"


def test_evaluation_uses_the_reference():
    model = make_model("ggd", True).eval()
    expected = model(tokens(20))
    model.attention = "fused"
    assert torch.equal(model(tokens(20)), expected) and len(posteriors(model, tokens(20))) == 2


# Values and all gradients on CUDA. The truth is the float64 model of reference.py; in bfloat16 the
# fused kernel may not be further from it than the reference attention, up to a factor.


def run(model, idx, doc_ids, weight, dtype, attention="fused", compiled=False):
    """Logits and the gradient of every parameter, on CUDA."""
    model.attention = attention
    model.zero_grad()
    forward = torch.compile(model, dynamic=False) if compiled else model
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        logits = forward(idx.cuda(), doc_ids=doc_ids.cuda())
    (logits.float() * weight.cuda()).sum().backward()
    found = {name: p.grad.double().cpu() for name, p in model.named_parameters()}
    return found | {"logits": logits.detach().double().cpu()}


def truth(model, idx, doc_ids, weight):
    p = reference.parameters(model)
    rows = []
    for tokens_of_row, ids in zip(idx.tolist(), doc_ids.tolist(), strict=True):
        rows.append(reference.forward(model, p, tokens_of_row, [ids.index(d) for d in ids]))
    logits = torch.stack(rows)
    (logits * weight).sum().backward()
    return {name: p[name].grad for name, _ in model.named_parameters()} | {
        "logits": logits.detach()
    }


def errors(got, expected):
    """Relative to the norm of each tensor."""
    return {name: ((got[name] - e).norm() / e.norm()).item() for name, e in expected.items()}


CUDA_CASES = [(pe, ssmax, 512) for pe, ssmax in ENCODINGS]
CUDA_CASES += [
    (pe, ssmax, T)
    for pe, ssmax in (("nope", False), ("alibi", True), ("ggd", True))
    for T in (509, 1024)
]
# log-priors of +-1e10 and 1e5 at the own token
EXTREME = {"theta_alpha": (0.5,), "theta_beta": (-2.0, -1.0)}


@pytest.mark.cuda
@pytest.mark.parametrize(("pe", "ssmax", "T"), CUDA_CASES)
def test_fused_values_and_gradients_on_cuda(pe, ssmax, T):
    """Float32 and bfloat16, heads of 48 channels as in the 120M model, packed documents."""
    model, idx, doc_ids = make_model(pe, ssmax, n_head=2, n_embd=96), tokens(T), documents(T)
    weight = torch.randn(2, T, 257, generator=torch.Generator().manual_seed(1))
    expected = truth(model, idx, doc_ids, weight)
    model.cuda()
    exact = errors(run(model, idx, doc_ids, weight, torch.float32), expected)
    assert max(exact.values()) < 1e-4, exact
    fused = errors(run(model, idx, doc_ids, weight, torch.bfloat16), expected)
    plain = errors(run(model, idx, doc_ids, weight, torch.bfloat16, "reference"), expected)
    assert all(fused[name] < 2 * plain[name] + 5e-3 for name in fused), (fused, plain)


@pytest.mark.cuda
@pytest.mark.parametrize("s", [None, 0.3, -0.3])
def test_fused_gradients_of_extreme_priors_on_cuda(s):
    """Where the prior alone decides, its gradient is 0, not rounding noise times a huge prior."""
    model = make_model("ggd", s is not None, n_head=2, n_embd=96, **EXTREME)
    if s is not None:
        torch.nn.init.constant_(model.blocks[0].attn.s, s)
        torch.nn.init.constant_(model.blocks[1].attn.s, s)
    idx, doc_ids = tokens(512), documents(512)
    weight = torch.randn(2, 512, 257, generator=torch.Generator().manual_seed(1))
    plain = run(model.cuda(), idx, doc_ids, weight, torch.float32, "reference")
    found = errors(run(model, idx, doc_ids, weight, torch.float32), plain)
    assert max(found.values()) < 1e-3, found


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("pe", "ssmax"), [("rope", False), ("alibi", False), ("ggd", False), ("ggd", True)]
)
def test_fused_inside_a_compiled_model_on_cuda(pe, ssmax):
    """As train.py runs it: the prior's vector, made in the compiled region, gets its gradient."""
    model, idx, doc_ids = make_model(pe, ssmax, n_head=2, n_embd=96), tokens(512), documents(512)
    weight = torch.randn(2, 512, 257, generator=torch.Generator().manual_seed(1))
    expected = truth(model, idx, doc_ids, weight)
    found = errors(run(model.cuda(), idx, doc_ids, weight, torch.float32, compiled=True), expected)
    assert max(found.values()) < 1e-4, found
