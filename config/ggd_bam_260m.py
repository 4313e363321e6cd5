# GGD-BAM with SSMax, 15 layers of width 1,152, 24 heads of 48.
#
# Parameters: 257,052,600 = 199.1M in the blocks + 50,304 x 1,152 = 58.0M in the embedding + 720 of
#             the prior + 360 of s. The paper's l15 has 274.6M: 32,768 words, an output layer of its
#             own.
# Tokens:     11.8 billion, as in ggd_bam_120m.py
# Work:       1,595 MFLOP a token, 1.9e19 in all: 13 hours of an H100, 42 of an A100, at 40% of peak
# Memory:     about 12 GB on each GPU: 6.8 of activations (32 bytes x 1,152 x 15 a token), 4.1 of
#             weights, gradients and optimizer, 0.8 of logits. A checkpoint has 3.1 GB. Arithmetic,
#             not measured.
base = "ggd_bam_120m.py"
out_dir = "out/ggd_bam_260m"
n_layer = 15
n_head = 24
n_embd = 1152
batch_size = 24  # 1,152 = 24 x 48: for 1, 2, 4, 8 or 16 GPUs
