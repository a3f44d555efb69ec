"""An Unsloth-based DDP fine-tuning kit: the parts that train_ddp.py and notebook_to_script.py put together."""

from unsloth_ddp.utils.packages import explain_missing_packages

# Before any other import of a command, because a forgotten `uv run` makes one of them fail.
explain_missing_packages()
