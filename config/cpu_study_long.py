# One training of the study with more training (study.py --config=config/cpu_study_long.py --rates=1): twice the quick
# start's budget, so that encodings which have to discover how to retrieve get the time for it. 558,244 parameters;
# 3200 steps x 4,096 = 13.1M bytes, each window of the data once; eight minutes on two CPU cores, 14 on one.
base = "ggd_bam_cpu.py"
out_dir = "out/cpu_study_long"

max_steps = 3200
dtype = "bfloat16"
compile = "true"
