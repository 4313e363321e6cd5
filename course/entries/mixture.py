"""A local generalized Gaussian and a uniform prior, mixed: p ~ w e^(-(d / alpha)^beta) + 1 - w.

Far keys never fall below 1 - w of the nearest, so one head can be local and still look anywhere.
w = sigmoid(theta_w) begins at 1/2, alpha = e^theta_alpha at 8 tokens, beta at 1.
"""

import math

import torch
from torch.nn.functional import logsigmoid


class MyPrior(torch.nn.Module):
    takes_ssmax = True

    def __init__(self, cfg, layer=0):
        super().__init__()
        for name, start in (("alpha", math.log(8)), ("beta", 0.0), ("w", 0.0)):
            value = torch.full((cfg.n_head,), start)  # (H,), the same in every head
            setattr(self, f"theta_{name}", torch.nn.Parameter(value))

    def forward(self, n):
        alpha, beta, w = (
            t.double()[:, None] for t in (self.theta_alpha, self.theta_beta, self.theta_w)
        )
        d = torch.arange(n, dtype=torch.float64, device=w.device)
        x = beta.exp() * ((d + 1e-5).log() - alpha)  # ln((d / alpha)^beta)
        return torch.logaddexp(logsigmoid(w) - x.clamp(max=30).exp(), logsigmoid(-w))
