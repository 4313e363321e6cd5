# Sinusoidal positions (Vaswani et al. 2017) at the 120M shape, added to the embeddings.
# 109,431,552 parameters; tokens, work and memory as in ggd_bam_120m.py.
# With SSMax: --ssmax=true --out_dir=...
base = "ggd_bam_120m.py"
out_dir = "out/sinusoidal_120m"
pe = "sinusoidal"
ssmax = False
