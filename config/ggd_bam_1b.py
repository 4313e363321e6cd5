# GGD-BAM with SSMax, 24 layers of width 2,048, 64 heads of 32: the paper's 1.1B, for several GPUs.
#
# Parameters: 1,109,760,512 = 1,006.7M in the blocks + 50,304 x 2,048 = 103.0M in the embedding +
#             3,072 of the prior + 1,536 of s. The paper's l24 has 1.14B, with 32,768 words and an
#             output layer of its own.
# Tokens:     11.8 billion, as in ggd_bam_120m.py
# Work:       6,809 MFLOP a token, 8.0e19 in all: at 40% of the peak 56 hours on one H100, 7 on
#             eight, 179 on one A100
# Memory:     about 21 GB on each of eight GPUs: 9.7 of activations (32 bytes x 2,048 x 24 a token),
#             8.9 of weights and gradients, 8.9 / 8 of the optimizer's state, 0.8 of logits. A
#             checkpoint has 13.3 GB. On one GPU: --shard_optimizer=false, and 8 GB more.
#             Arithmetic, not measured.
base = "ggd_bam_120m.py"
out_dir = "out/ggd_bam_1b"
n_layer = 24
n_head = 64
n_embd = 2048
batch_size = 12  # 1,152 = 12 x 96: for 2, 4, 8, 16 or 32 GPUs
shard_optimizer = True
