"""An Unsloth-based DDP fine-tuning kit: the parts that train_ddp.py and notebook_to_script.py put together."""
