"""Fine-tune StarCoder on one machine with several 16 GB GPUs. `train.py` and `python -m finetune` are made of this."""
