"""Fields of TRL's SFTConfig that `trainer_args` may not set, each with what there is instead.

The kit reads, orders, pads and packs the rows, computes the loss and evaluates by itself, so that most of these would be
taken and then do nothing; the others would undo what it does.
"""

from __future__ import annotations

PACKING = "use --packing; what is not packed is padded to the longest row of its micro-batch"
READING = "rows are read by the names of their columns; rename them"
SUPERVISED = "use --loss_on"
ORDER = "rows are shuffled by --seed in every epoch, and each is seen once"
LOSS = "the loss is the negative log-likelihood, averaged over the supervised tokens of a step, and nothing else"
EVALUATION = "an evaluation is the loss of the evaluation rows, in the precision of the training"
SHARDING = "weights are shared out by accelerate's config, such as accelerate_configs/fsdp2.yaml"
PUSHING = "--push_to_hub pushes once, when the run has ended"
RESUMING = "use --resume"
LAUNCHER = "the launcher and the devices decide it"
PHASES = "a run trains, and evaluates by --eval_strategy"

OWNED_ARGS = {
    "packing_strategy": PACKING,
    "padding_free": PACKING,
    "eval_packing": PACKING,
    "pad_to_multiple_of": PACKING,
    "max_seq_length": "use --max_length",
    "truncation_mode": "use --overlong",
    "dataset_text_field": READING,
    "dataset_kwargs": READING,
    "remove_unused_columns": READING,
    "chat_template_path": "use --chat_template",
    "eos_token": "a row ends as the chat template has it; use --chat_template, or change the tokenizer's files",
    "pad_token": "change the tokenizer's files",
    "model_init_kwargs": "use the options of train_ddp.py --help",
    "assistant_only_loss": SUPERVISED,
    "completion_only_loss": SUPERVISED,
    "shuffle_dataset": ORDER,
    "train_sampling_strategy": ORDER,
    "length_column_name": ORDER,
    "dataloader_drop_last": ORDER,
    "loss_type": LOSS,
    "label_smoothing_factor": LOSS,
    "router_aux_loss_coef": LOSS,
    "average_tokens_across_devices": LOSS,
    "label_names": LOSS,
    "prediction_loss_only": EVALUATION,
    "eval_do_concat_batches": EVALUATION,
    "eval_use_gather_object": EVALUATION,
    "eval_accumulation_steps": EVALUATION,
    "include_for_metrics": EVALUATION,
    "batch_eval_metrics": EVALUATION,
    "bf16_full_eval": EVALUATION,
    "fp16_full_eval": EVALUATION,
    "bf16": "use --precision",
    "fp16": "use --precision",
    "use_cache": "nothing is cached in training",
    "auto_find_batch_size": "leave --per_device_train_batch_size at auto",
    "fsdp": SHARDING,
    "fsdp_config": SHARDING,
    "deepspeed": SHARDING,
    "parallelism_config": SHARDING,
    "accelerator_config": LAUNCHER,
    "ddp_backend": LAUNCHER,
    "local_rank": LAUNCHER,
    "do_train": PHASES,
    "do_eval": PHASES,
    "do_predict": PHASES,
    "resume_from_checkpoint": RESUMING,
    "ignore_data_skip": RESUMING,
    "save_only_model": "a run goes on only with the state of its optimizer; --save_strategy no writes the result alone, and "
    "--save_total_limit keeps fewer checkpoints",
    "enable_jit_checkpoint": "a signal to stop writes a checkpoint by itself",
    "hub_token": "put it into HF_TOKEN, or log in once (hf auth login)",
    "hub_strategy": PUSHING,
    "hub_always_push": PUSHING,
    "hub_revision": PUSHING,
}
