"""What a run will need, before anything is rented: memory, steps, time, network. `python -m unsloth_ddp.plan`."""
