# GGD-BAM with SSMax, 8 layers of width 768, 16 heads of 48: the paper's l8.
#
# Parameters: 85,832,832 = 47.2M in the blocks + 50,304 x 768 = 38.6M in the embedding + 256 of the
#             prior + 128 of s. The paper's l8 has 97.5M: 32,768 words, an output layer of its own.
# Tokens:     11.8 billion, as in ggd_bam_120m.py
# Work:       534 MFLOP a token, 6.3e18 in all: 4.4 hours of an H100, 14 of an A100, at 40% of peak
# Memory:     about 6 GB on each GPU: 3.6 of activations (32 bytes x 768 x 8 a token), 1.4 of
#             weights, gradients and optimizer, 0.8 of logits. A checkpoint has 1.0 GB. Arithmetic,
#             not measured.
base = "ggd_bam_120m.py"
out_dir = "out/ggd_bam_85m"
n_layer = 8
