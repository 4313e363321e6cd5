# NoPE at the 120M shape: nothing but the causal mask, so a uniform prior over earlier tokens.
# 109,431,552 parameters; tokens, work and memory as in ggd_bam_120m.py.
# With SSMax: --ssmax=true --out_dir=...
base = "ggd_bam_120m.py"
out_dir = "out/nope_120m"
pe = "nope"
ssmax = False
