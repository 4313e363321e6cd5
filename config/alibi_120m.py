# ALiBi (Press et al. 2022) at the 120M shape: a Laplace prior with the slopes 2^-0.5 ... 2^-8.
# 109,431,552 parameters; tokens, work and memory as in ggd_bam_120m.py.
# With SSMax, on the content only: --ssmax=true --out_dir=...
base = "ggd_bam_120m.py"
out_dir = "out/alibi_120m"
pe = "alibi"
ssmax = False
