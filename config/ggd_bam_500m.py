# GGD-BAM with SSMax, 18 layers of width 1,536, 32 heads of 48.
#
# Parameters: 501,998,784 = 424.7M in the blocks + 50,304 x 1,536 = 77.3M in the embedding + 1,152
#             of the prior + 576 of s. The paper's l18 has 525.4M: 32,768 words, an output layer of
#             its own.
# Tokens:     11.8 billion, as in ggd_bam_120m.py
# Work:       3,097 MFLOP a token, 3.7e19 in all: 26 hours of an H100, 81 of an A100, at 40% of peak
# Memory:     about 17 GB on each GPU: 8.2 of activations (32 bytes x 1,536 x 18 a token), 8.0 of
#             weights, gradients and optimizer, 0.8 of logits. A checkpoint has 6.0 GB. Arithmetic,
#             not measured.
base = "ggd_bam_120m.py"
out_dir = "out/ggd_bam_500m"
n_layer = 18
n_head = 32
n_embd = 1536
batch_size = 18  # 1,152 = 18 x 64: for 1, 2, 4, ... 64 GPUs
