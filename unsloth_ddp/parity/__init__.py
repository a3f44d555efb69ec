"""The same few steps with every launcher, on one process and on many, compared. `python -m unsloth_ddp.parity`."""
