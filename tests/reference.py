"""The model again, in float64, row by row, from the formulas, to check model.py. Shares no code."""

import math

import torch


def slopes(n_head):
    """ALiBi's slopes by the recursive rule of its paper."""
    if math.log2(n_head).is_integer():
        first = 2 ** (-(2 ** -(math.log2(n_head) - 3)))
        return [first ** (h + 1) for h in range(n_head)]
    below = 2 ** math.floor(math.log2(n_head))
    return slopes(below) + slopes(2 * below)[0::2][: n_head - below]


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turn(x, t):
    """RoPE of x (N, D) at the positions t (N,): channels i and i + D/2 are a complex number."""
    half = x.shape[1] // 2
    z = torch.complex(x[:, :half], x[:, half:])
    w = torch.tensor([500_000.0 ** (-i / half) for i in range(half)], dtype=torch.float64)
    z = z * torch.polar(torch.ones(len(x), half, dtype=torch.float64), torch.outer(t, w))
    return torch.cat((z.real, z.imag), 1)


def log_prior(cfg, p, layer, h, distance):
    """b at j - i = -distance, as the paper writes it."""
    if cfg.pe == "alibi":
        return -slopes(cfg.n_head)[h] * distance
    if cfg.pe == "ggd":
        place = f"blocks.{layer}.attn.prior.theta_"
        a, b, m = (p[place + name][h] for name in ("alpha", "beta", "mu"))
        return -(a.exp()) * ((-distance - (m.exp() - (-m).exp())).abs() + 1e-5) ** b
    return torch.zeros_like(distance)


def attention_rows(cfg, p, layer, x, starts):
    """For one sequence x (T, C): yields (h, i, visible j, content, prior, values), all scaled."""
    D = cfg.n_embd // cfg.n_head
    qkv = x @ p[f"blocks.{layer}.attn.qkv.weight"].T
    at = torch.tensor([i - start for i, start in enumerate(starts)], dtype=torch.float64)
    for h in range(cfg.n_head):
        q, k, v = (part[:, h * D : (h + 1) * D] for part in qkv.chunk(3, 1))
        if cfg.pe == "rope":
            q, k = turn(q, at), turn(k, at)
        for i, start in enumerate(starts):
            js = range(start, i + 1)
            content = k[start : i + 1] @ q[i] / math.sqrt(D)
            prior = log_prior(cfg, p, layer, h, at[i] - at[start : i + 1])
            prior = prior - prior.max()  # no softmax can see it, and float64 too has its limits
            if cfg.ssmax:
                scale = p[f"blocks.{layer}.attn.s"][h] * math.log(len(js))
                content = content * scale
                if cfg.pe != "alibi" and cfg.ssmax_scales == "posterior":
                    prior = prior * scale
            yield h, i, js, content, prior, v[start : i + 1]


def parameters(model):
    """Every weight and buffer as a float64 leaf that can hold a gradient."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: t.detach().double().requires_grad_() for name, t in tensors.items()}


def forward(model, p, tokens, starts=None):
    """Logits (T, V) of one sequence; starts[i] is where the document of token i begins."""
    cfg = model.cfg
    starts = starts or [0] * len(tokens)
    x = p["embedding.weight"][torch.tensor(tokens)]
    if cfg.pe == "sinusoidal":
        table = []
        for i, start in enumerate(starts):
            angle = [(i - start) / 10_000 ** (c / cfg.n_embd) for c in range(0, cfg.n_embd, 2)]
            table.append([math.sin(a) for a in angle] + [math.cos(a) for a in angle])
        x = x + torch.tensor(table, dtype=torch.float64) / math.sqrt(cfg.n_embd)
    for layer in range(cfg.n_layer):
        name = f"blocks.{layer}."
        heads = [[None] * cfg.n_head for _ in tokens]
        rows = attention_rows(cfg, p, layer, norm(x, p[name + "norm_attn.weight"]), starts)
        for h, i, _, content, prior, values in rows:
            heads[i][h] = torch.softmax(content + prior, 0) @ values
        x = x + torch.stack([torch.cat(row) for row in heads]) @ p[name + "attn.out.weight"].T
        hidden = norm(x, p[name + "norm_mlp.weight"]) @ p[name + "mlp.gate_up.weight"].T
        gate, up = hidden.chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ p[name + "mlp.down.weight"].T
    head = p.get("head.weight", p["embedding.weight"])
    return (norm(x, p["norm.weight"]) @ head.T)[:, : cfg.vocab_size]
