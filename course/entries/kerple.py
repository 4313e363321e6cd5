"""KERPLE's logarithmic kernel (Chi et al. 2022): b = -r1 ln(1 + r2 d), with r1, r2 > 0.

The weight e^b = (1 + r2 d)^-r1 is a power law: it falls without limit, but at twice the distance by
a constant factor only. For r1 < 1 far keys together keep most of the mass.
"""

import torch


class MyPrior(torch.nn.Module):
    takes_ssmax = True

    def __init__(self, cfg, layer=0):
        super().__init__()
        self.theta_r1 = torch.nn.Parameter(torch.zeros(cfg.n_head))  # (H,), logarithms
        self.theta_r2 = torch.nn.Parameter(torch.zeros(cfg.n_head))

    def forward(self, n):
        r1, r2 = self.theta_r1.double().exp()[:, None], self.theta_r2.double().exp()[:, None]
        d = torch.arange(n, dtype=torch.float64, device=r1.device)
        return -r1 * torch.log1p(r2 * d)
