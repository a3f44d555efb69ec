"""Turn a YAML file of axolotl, LLaMA-Factory or TRL into one of this kit: `python -m unsloth_ddp.port FILE`."""
