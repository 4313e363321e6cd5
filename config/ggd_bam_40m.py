# GGD-BAM with SSMax, 6 layers of width 512, 16 heads of 32: the paper's smallest shape, l6.
#
# Parameters: 41,491,232 = 15.7M in the blocks + 50,304 x 512 = 25.8M in the embedding + 192 of the
#             prior + 96 of s. The paper's l6 has 49.3M: 32,768 words, an output layer of its own.
# Tokens:     11.8 billion, as in ggd_bam_120m.py
# Work:       258 MFLOP a token, 3.0e18 in all: 2.1 hours of an H100, 7 of an A100, at 40% of peak
# Memory:     about 4 GB on each GPU: 1.8 of activations (32 bytes x 512 x 6 a token), 0.7 of
#             weights, gradients and optimizer, 0.8 of logits. A checkpoint has 0.5 GB. Arithmetic,
#             not measured.
base = "ggd_bam_120m.py"
out_dir = "out/ggd_bam_40m"
n_layer = 6
n_embd = 512
