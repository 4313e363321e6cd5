# The embedded default: a byte-level GGD-BAM with SSMax that learns retrieval on a laptop, with no download.
# Two CPU cores: some five minutes at 21,000 tokens a second; 558,244 parameters; 1600 steps x 4,096 = 6.6M bytes read.
#
# Most training windows are retrieval exercises in the form of the passkey test, none longer than block_size. The big
# models of the paper learn retrieval from 10B tokens of text alone; a laptop has no time for that. So compare encodings
# on these exercises with each other, never with models that had none.
#
# Other encodings, same data and budget: --pe=rope --ssmax=false --out_dir=out/rope_cpu, and so on.

# data: the documentation that ships inside this Python; 85% of the windows hold exercises
data = "data/pydocs"
prepare = "--source=pydocs --tokenizer=bytes --window=256 --retrieval_fraction=0.85"
out_dir = "out/ggd_bam_cpu"

# model
vocab_size = 257  # 256 bytes and <|endoftext|>
vocab_multiple = 1
n_layer = 3
n_head = 4
n_embd = 128
block_size = 256
tie_embeddings = False
ssmax_init = 0.18  # 1 / ln(256): about as sharp as plain softmax at the end of a window; the paper starts at 1

# The paper starts every head at theta = 0, uniform. 1600 steps are little time to leave it, so here the heads start
# with a task each. The first two layers have four windows, alpha = 1.5, 3, 5 and 8 tokens with beta = 8: they tell a
# token what stood just before it. The last layer has two windows, and two anti-local heads, which compare that with
# all that came earlier. As only the last layer looks far, a text of any length costs linear time (streaming.py).
# High beta and narrow windows matter far past the training length, where s ln n has doubled: a local head narrows to
# alpha (s ln n)^(-1/beta) and weighs its few tokens more sharply, and what it tells must still look the same.
theta_alpha = (-3.24, -8.79, -12.88, -16.64) * 2 + (-3.24, -16.64, 0.0, 0.0)  # -beta ln(alpha) for the windows
theta_beta = (8.0,) * 8 + (8.0, 8.0, -1.0, -2.0)

# training: small steps rather than few; a model begins to retrieve after some hundred steps, whatever their size
batch_size = 16
tokens_per_step = 16 * 256
max_steps = 1600
optimizer = "adamw"
learning_rate = 3e-3
prior_lr = 5e-2
ssmax_lr = 5e-2
warmup_steps = 50
eval_interval = 100
eval_windows = 64
