# RoPE (Su et al. 2021) with theta 500,000 at the 120M shape. The paper's Local RoPE is this model,
# evaluated with --window_attention=512.
# 109,431,552 parameters; tokens, work and memory as in ggd_bam_120m.py.
# With SSMax: --ssmax=true --out_dir=...
base = "ggd_bam_120m.py"
out_dir = "out/rope_120m"
pe = "rope"
ssmax = False
