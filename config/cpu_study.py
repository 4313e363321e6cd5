# One training of the laptop study (study.py): the quick start's model and data on a smaller budget, since there are
# over seventy of them. 558,244 parameters; 800 steps x 2,048 = 1.6M bytes; about a minute each on two CPU cores.
base = "ggd_bam_cpu.py"
out_dir = "out/cpu_study"

batch_size = 8
tokens_per_step = 8 * 256
max_steps = 800
log_interval = 5  # the losses decide which learning rate an encoding gets
eval_interval = 400

# 1.5 times as fast as float32 on a CPU that has bfloat16 instructions. Where no compiler is found, it goes on without.
dtype = "bfloat16"
compile = "true"
