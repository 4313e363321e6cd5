# GGD-BAM with SSMax at the paper's 120M shape: 12 layers of width 768, 16 heads of 48, 512 tokens.
#
# Parameters: 109,432,128 = 70.8M in the blocks + 50,304 x 768 = 38.6M in the embedding, which the
#             output layer shares, + 384 of the prior (2 x 16 x 12) + 192 of SSMax. The paper has
#             121M: the same blocks, 32,768 words, and an output layer of its own. Here: GPT-2's
#             50,257 words, padded to a multiple of 64. Queries and keys start as in the paper, the
#             other matrices as `init_weights` says.
# Tokens:     20,000 steps x 589,824 = 11.8 billion, about 1.15 epochs of FineWeb's sample-10BT
# Work:       685 MFLOP a token, 8.1e18 in all: 5.7 hours of an H100, 18 of an A100, at 40% of peak
# Memory:     about 8 GB on each GPU: 5.4 of activations (32 bytes x 768 x 12 a token), 1.8 of
#             weights, gradients and optimizer, 0.8 of logits. A checkpoint has 1.3 GB.
# The hours and the memory are this arithmetic, not measurements.
#
# 1,152 windows a step = 36 x 32, so 1, 2, 4, 8, 16 or 32 GPUs give the same run.

# data: python prepare_fineweb.py
data = "data/fineweb10B"
out_dir = "out/ggd_bam_120m"

# model
vocab_size = 50257
n_layer = 12
n_head = 16
n_embd = 768
block_size = 512
pe = "ggd"
ssmax = True
ssmax_init = 1.0

# training, as in the paper: RAdam needs no warm-up
batch_size = 36
tokens_per_step = 1152 * 512
max_steps = 20_000
optimizer = "radam"
learning_rate = 1e-3
prior_lr = 1e-3
ssmax_lr = 1e-3
min_lr_fraction = 0.1
weight_decay = 0.1
grad_clip = 1.0
eval_interval = 1000
eval_windows = 7680  # 3,932,160 tokens
