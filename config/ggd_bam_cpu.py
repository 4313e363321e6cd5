# The quick start and the laptop study: a byte-level GGD-BAM with SSMax that learns to retrieve.
# Nothing to download. 558,244 parameters; 3200 steps x 4,096 = 13.1M bytes, each window of the data
# once: five to ten minutes on two CPU cores that have bfloat16 instructions, else up to forty.
#
# Most training windows are retrieval exercises in the form of the passkey test, none longer than
# block_size. The paper's big models learn retrieval from 10B tokens of text alone, and a laptop has
# no time for that. So compare encodings on these exercises with each other, never with models that
# had none.
#
# Every head starts where the paper starts, theta = 0: nothing is made by hand. Another encoding
# with the same data and budget: --pe=rope --virtual_length=1 --out_dir=out/rope_cpu

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

# Not in the paper: training draws a length for SSMax, up to 1,000 times the real one (model.py).
# The paper's method is --virtual_length=1 --ssmax_init=0.18. s starts at 1 over the mean of
# ln n + u, so that attention starts about as sharp as plain softmax; the paper starts it at 1.
virtual_length = 1000.0
ssmax_init = 0.12

# training: small steps rather than few; a model begins to retrieve after some hundred steps
batch_size = 16
tokens_per_step = 16 * 256
max_steps = 3200
optimizer = "adamw"
learning_rate = 3e-3
prior_lr = 5e-2
ssmax_lr = 5e-2
warmup_steps = 50
eval_interval = 200
eval_windows = 64

compile = "true"  # where no compiler is found, it continues without
