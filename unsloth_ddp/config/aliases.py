"""List the names that other tools give to options, each with the kit's option and value, or why there is none.

The one table serves the refusal of an unknown option, `python -m unsloth_ddp.port`, and docs/keys.md. Names
are those of axolotl 067b021, LLaMA-Factory ff6d4d1, TRL 1.15 with Transformers 5.17, ms-swift 3602360, Unsloth's
unsloth-cli.py, and the fine-tuning scripts of Qwen's and MiniCPM's guides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TOOLS = {"A": "axolotl", "L": "LLaMA-Factory", "T": "TRL", "S": "ms-swift", "G": "guides"}


@dataclass(frozen=True)
class Alias:
    """The counterpart of another tool's option here.

    Attributes:
        tools: Letters of TOOLS.
        option: The option that takes the value unchanged.
        values: By value (in lower case), the options to give instead; an empty mapping where nothing has to be given.
        note: Why a value that is not in `values` has no option, and what to do.
    """

    tools: str
    option: str | None = None
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    note: str = ""

    def translate(self, value: Any) -> dict[str, Any] | None:
        """Return the options that say the same as `value`, or None where there are none."""
        options = self.values.get(str(value).lower())
        if options is not None:
            return dict(options)
        return {self.option: value} if self.option else None


# Option -> names that take the same values: "name/tools".
RENAMED = {
    "model": "base_model/A model_name_or_path/LTG model_name/G model_id/G model_path/G base_model_name/G "
        "pretrained_model_name_or_path/G",
    "model_revision": "revision_of_model/A revision/G",
    "attn_implementation": "attn_impl/S",
    "lora_r": "lora_rank/LSG r/G rank/G",
    "lora_target_modules": "target_modules/S",
    "lora_target_parameters": "target_parameters/S",
    "lora_modules_to_save": "modules_to_save/S additional_target/L",
    "lora_trainable_tokens": "trainable_token_indices/G",
    "use_rslora": "peft_use_rslora/A",
    "dataset": "dataset_name/T data/G data_path/G train_file/G train_data/G data_files/G train_dataset/G",
    "dataset_split": "dataset_train_split/T",
    "eval_dataset_split": "dataset_test_split/T",
    "eval_dataset": "val_dataset/S eval_data_path/G validation_file/G eval_file/G",
    "eval_fraction": "val_size/L split_dataset_ratio/S val_set_size/A validation_split/G",
    "max_length": "sequence_len/A cutoff_len/L max_seq_length/T max_seq_len/G model_max_length/G seq_length/G "
        "max_model_len/S block_size/G",
    "streaming": "dataset_streaming/T",
    "shuffle_buffer": "buffer_size/L shuffle_buffer_size/S",
    "dataset_num_proc": "preprocessing_num_workers/L dataset_processes/A",
    "per_device_train_batch_size": "micro_batch_size/A micro_batch/G per_gpu_train_batch_size/G "
        "per_device_batch_size/G",
    "per_device_eval_batch_size": "eval_batch_size/A per_gpu_eval_batch_size/G",
    "global_batch_size": "total_batch_size/G train_batch_size/G effective_batch_size/G",
    "gradient_accumulation_steps": "grad_accum/G gradient_accumulation/G accumulation_steps/G",
    "num_train_epochs": "num_epochs/A epochs/G",
    "learning_rate": "lr/G",
    "lr_scheduler_type": "lr_scheduler/A scheduler/G",
    "warmup_steps": "warmup_ratio/ALTSG",
    "optim": "optimizer/A",
    "eval_strategy": "evaluation_strategy/T",
    "early_stopping_patience": "early_stopping_steps/L",
    "loss_on": "train_on/G",
    "image_folder": "media_dir/L image_dir/G",
    "image_max_pixels": "max_pixels/S",
    "beta": "rl_beta/A pref_beta/L orpo_alpha/A",
    "reference_model": "ref_model/LSG ref_model_name_or_path/G",
    "label_smoothing": "dpo_label_smoothing/AL",
    "sft_weight": "pref_ftx/L rpo_alpha/AS cpo_alpha/A",
    "desirable_weight": "kto_desirable_weight/A kto_chosen_weight/L",
    "undesirable_weight": "kto_undesirable_weight/A kto_rejected_weight/L",
    "seed": "random_state/G",
    "push_to_hub": "push_model/G",
    "hub_model_id": "hub_path/G",
    "ddp_find_unused_parameters": "find_unused_parameters/G",
}  # fmt: skip

_TASKS = (
    "the kit trains on text (task sft), pairs of answers (task dpo, orpo, simpo, cpo) and labelled answers (task kto)"
)
_QLORA, _LORA, _FULL = {"method": "qlora"}, {"method": "lora"}, {"method": "full"}
_NOTHING: dict[str, Any] = {}
_NOT_4_BIT = "8-bit base weights are not offered; method lora keeps the base in 16 bit, method qlora in 4 bit"
_EXPORT = (
    "export the result: uv run python -m unsloth_ddp.export RUN --to gguf --quantize TYPE (or merged, vllm, ollama)"
)
_METHODS = "the methods are lora, qlora and full"

# "name/tools" -> value -> options, and what is said of other values.
VALUED: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "freeze_vision_tower/L freeze_vit/S fix_vit/G": (
        {"true": {}, "false": {"train_towers": "tower"}},
        "towers are frozen unless train_towers is given",
    ),
    "freeze_multi_modal_projector/L freeze_aligner/S": (
        {"true": {}, "false": {"train_towers": "projector"}},
        "projectors are frozen unless train_towers is given",
    ),
    "freeze_language_model/L freeze_llm/S": ({"false": _NOTHING}, "the text decoder is always trained"),
    "tune_llm/G": ({"true": _NOTHING}, "the text decoder is always trained"),
    "tune_vision/G": ({"false": {}, "true": {"train_towers": True}}, "train_towers trains towers and projectors"),
    "load_in_4bit/ATG q_lora/G qlora/G": ({"true": _QLORA, "false": _NOTHING}, "give method qlora"),
    "quantization_bit/L quant_bits/S": ({"4": _QLORA, "none": _NOTHING}, _NOT_4_BIT),
    "load_in_8bit/ATG": ({"false": _NOTHING}, _NOT_4_BIT),
    "adapter/A": ({"lora": _LORA, "qlora": _QLORA, "none": _FULL}, _METHODS),
    "finetuning_type/L tuner_type/S train_type/S sft_type/S": ({"lora": _LORA, "full": _FULL}, _METHODS),
    "use_lora/G use_peft/T peft/G": ({"true": _LORA, "false": _FULL}, "give method lora"),
    "full_finetuning/G": ({"true": _FULL, "false": _NOTHING}, "give method full"),
    "lora_target_linear/A": (
        {"true": {"lora_target_modules": ["all-linear"]}, "false": _NOTHING}, "name them in lora_target_modules",
    ),
    "bias/G": ({"none": _NOTHING}, "only bias none is offered"),
    "save_model/G": ({"true": _NOTHING, "false": _NOTHING}, "leave it out"),
    "save_method/G": ({"merged_16bit": {"merge": True}, "lora": _NOTHING}, _EXPORT),
    "lora_target/L": ({"all": {"lora_target_modules": ["all-linear"]}}, "name them in lora_target_modules"),
    "use_unsloth/L": ({"true": {"backend": "unsloth"}, "false": _NOTHING}, "give backend unsloth"),
    "tuner_backend/S": ({"unsloth": {"backend": "unsloth"}, "peft": _NOTHING}, "give backend unsloth"),
    "bf16/ALTSG": (
        {"true": {"precision": "bf16"}, "auto": _NOTHING, "full": {"precision": "bf16"}, "false": _NOTHING},
        "give precision bf16",
    ),
    "fp16/ALTSG float16/A": ({"true": {"precision": "fp16"}, "false": _NOTHING}, "give precision fp16"),
    "bfloat16/A": ({"true": {"precision": "bf16"}, "false": _NOTHING}, "give precision bf16"),
    "mixed_precision/G": (
        {"bf16": {"precision": "bf16"}, "fp16": {"precision": "fp16"}, "no": {"precision": "fp32"}}, "give precision",
    ),
    "dtype/TG torch_dtype/TSG": (
        {"bfloat16": {"precision": "bf16"}, "float16": {"precision": "fp16"}, "float32": _NOTHING, "auto": _NOTHING,
         "none": _NOTHING},
        "give precision, and full_weights for the trained weights of method full",
    ),
    "pure_bf16/L": (
        {"true": {"precision": "bf16", "full_weights": "bf16"}, "false": _NOTHING}, "give full_weights bf16",
    ),
    "sample_packing/A neat_packing/L": (
        {"true": {"packing": "on"}, "false": _NOTHING, "auto": _NOTHING}, "give packing on",
    ),
    "padding_free/TS": ({"true": {"packing": "on"}, "false": _NOTHING}, "give packing on"),
    "excess_length_strategy/A": ({"drop": {"overlong": "drop"}, "truncate": {"overlong": "truncate"}}, "give overlong"),
    "truncation_strategy/S": (
        {"delete": {"overlong": "drop"}, "right": {"overlong": "truncate"}}, "give overlong drop or truncate",
    ),
    "train_on_inputs/A train_on_prompt/L": (
        {"true": {"loss_on": "all"}, "false": {"loss_on": "assistant"}}, "give loss_on assistant or all",
    ),
    "assistant_only_loss/T completion_only_loss/T": (
        {"true": {"loss_on": "assistant"}, "false": {"loss_on": "all"}}, "give loss_on assistant or all",
    ),
    "enable_thinking/L": (
        {
            "true": {"chat_template_kwargs": {"enable_thinking": True}},
            "false": {"chat_template_kwargs": {"enable_thinking": False}},
        },
        "give chat_template_kwargs",
    ),
    "loss_scale/S": ({"default": {"loss_on": "assistant"}, "all": {"loss_on": "all"}}, "give loss_on assistant or all"),
    "disable_gradient_checkpointing/L": (
        {"true": {"gradient_checkpointing": "none"}, "false": _NOTHING}, "give gradient_checkpointing none",
    ),
    "use_gradient_checkpointing/G": (
        {"true": {"gradient_checkpointing": "torch"}, "unsloth": {"gradient_checkpointing": "unsloth"},
         "false": {"gradient_checkpointing": "none"}},
        "give gradient_checkpointing",
    ),
    "resume_from_checkpoint/ALTSG": (
        {"true": {"resume": "auto"}, "false": {"resume": "no"}, "none": _NOTHING},
        "give resume with the checkpoint's folder",
    ),
    "auto_resume_from_checkpoints/A": ({"true": {"resume": "auto"}, "false": _NOTHING}, "give resume auto"),
    "evals_per_epoch/A": ({"1": {"eval_strategy": "epoch"}, "0": {"eval_strategy": "no"}}, "give eval_steps"),
    "saves_per_epoch/A": ({"1": {"save_strategy": "epoch"}, "0": {"save_strategy": "no"}}, "give save_steps"),
    "do_train/LT plot_loss/L save_safetensors/A strict/A": ({"true": _NOTHING, "false": _NOTHING}, "leave it out"),
    "do_eval/T": ({"true": _NOTHING, "false": {"eval_strategy": "no"}}, "give eval_strategy"),
    "stage/L": (
        {"sft": _NOTHING, "dpo": {"task": "dpo"}, "kto": {"task": "kto"}},
        f"{_TASKS}; for pt give rows with a text column",
    ),
    "rl/A rlhf_type/S": (
        {"dpo": {"task": "dpo"}, "ipo": {"task": "dpo", "preference_loss": "ipo"}, "orpo": {"task": "orpo"},
         "simpo": {"task": "simpo"}, "cpo": {"task": "cpo"}, "kto": {"task": "kto"}},
        _TASKS,
    ),
    "pref_loss/L": (
        {"sigmoid": _NOTHING, "hinge": {"preference_loss": "hinge"}, "ipo": {"preference_loss": "ipo"},
         "orpo": {"task": "orpo"}, "simpo": {"task": "simpo"}},
        "the losses of pairs are sigmoid, sigmoid_norm, hinge, ipo and robust (preference_loss), and the tasks orpo, "
        "simpo and cpo",
    ),
    "precompute_ref_log_probs/AT": (
        {"true": {"reference": "precomputed"}, "false": _NOTHING}, "give reference precomputed",
    ),
    "use_tensorboard/A": ({"true": {"report_to": ["tensorboard"]}, "false": _NOTHING}, "give report_to tensorboard"),
    "use_wandb/A": ({"true": {"report_to": ["wandb"]}, "false": _NOTHING}, "give report_to wandb"),
    "use_mlflow/A": ({"true": {"report_to": ["mlflow"]}, "false": _NOTHING}, "give report_to mlflow"),
    "use_swanlab/AL": ({"true": {"report_to": ["swanlab"]}, "false": _NOTHING}, "give report_to swanlab"),
    "use_comet/A": ({"true": {"report_to": ["comet_ml"]}, "false": _NOTHING}, "give report_to comet_ml"),
    "use_trackio/A": ({"true": {"report_to": ["trackio"]}, "false": _NOTHING}, "give report_to trackio"),
}  # fmt: skip

# Why there is no option -> "name/tools ...".
WITHOUT = {
    "give it to the launcher, before the name of the script":
        "num_processes/G num_machines/G machine_rank/G main_process_ip/G main_process_port/G nproc_per_node/G "
        "nnodes/G node_rank/G master_addr/G master_port/G multi_gpu/G",
    "the launcher's file goes before train_ddp.py; --config takes a file of options": "config_file/G",
    "the launcher decides it: uv run accelerate launch --config_file accelerate_configs/zero2.yaml (or zero3.yaml, "
    "fsdp2.yaml) train_ddp.py":
        "deepspeed/ALTSG fsdp/ALTS fsdp_config/ATS fsdp_version/A dp_shard_size/A dp_replicate_size/A "
        "fsdp_final_state_dict_type/A fsdp_transformer_layer_cls_to_wrap/L deepcompile/A",
    "an adapter is not trained further; merge it into its base and give the result as model, or continue an "
    "unfinished run with resume":
        "lora_model_dir/A adapter_name_or_path/L adapters/S lora_path/G",
    "read from the model's own files":
        "model_type/AS tokenizer_type/A processor_type/A base_model_config/A tokenizer_config/A "
        "tokenizer_use_fast/A use_fast_tokenizer/L tokenizer_legacy/A is_llama_derived_model/A "
        "is_mistral_derived_model/A is_falcon_derived_model/A is_qwen_derived_model/A tokenizer_name_or_path/G "
        "config_name/G rope_scaling/ALS low_cpu_mem_usage/ALG use_cache/T",
    "change the tokenizer's files instead":
        "special_tokens/A eos_token/T pad_token/T added_tokens_overrides/A eot_tokens/A split_special_tokens/L",
    "add tokens to a copy of the model (docs/rows.md, New tokens), and give lora_trainable_tokens":
        "tokens/A resize_token_embeddings_to_32x/A add_tokens/L add_special_tokens/L resize_vocab/L "
        "new_special_tokens/S",
    "the tokenizer's own chat template is used; give another as chat_template, and a system message in the rows":
        "template/LS conversation_template/G default_system/L system/S default_system_message/A tool_format/L "
        "agent_template/S",
    "write it to a file and give that as chat_template": "chat_template_jinja/A",
    "give the Jinja file as chat_template": "chat_template_path/T",
    "give report_to wandb, and WANDB_PROJECT, WANDB_ENTITY and WANDB_NAME in the environment":
        "wandb_project/A wandb_entity/A wandb_name/A wandb_run_id/A wandb_mode/A wandb_watch/A wandb_log_model/A",
    "set the tracker's own environment variables":
        "mlflow_tracking_uri/A mlflow_experiment_name/A swanlab_project/AL swanlab_run_name/L swanlab_mode/AL",
    "rows are read and tokenized at every start":
        "dataset_prepared_path/A overwrite_cache/L tokenized_path/L cache_dir/LG push_dataset_to_hub/A "
        "skip_prepare_dataset/A load_from_cache_file/S cached_dataset/S dataset_keep_in_memory/A "
        "preprocessing_batch_size/L",
    "give a slice of each dataset, such as rows.jsonl[:1000]": "max_samples/L",
    "give each dataset its weight, such as a.jsonl:3 b.jsonl:1": "interleave_probs/L mix_strategy/L",
    "name the files or Hub ids in dataset and eval_dataset": "datasets/AT test_datasets/A",
    "name the files or Hub ids themselves in dataset": "dataset_dir/L dataset_info/L",
    "rows are read by the names of their columns (messages, conversations, instruction, prompt, text); columns "
    "renames them":
        "dataset_text_field/T remove_unused_columns/ATS dataset_kwargs/T field_messages/A",
    "give streaming with max_steps where the rows are too many to tokenize beforehand": "lazy_preprocess/G",
    "give the rows (with a text column) as dataset, with streaming and max_steps": "pretraining_dataset/A",
    "rows are shuffled by seed in every epoch":
        "shuffle_merged_datasets/A dataset_shuffle/S disable_shuffling/L shuffle_dataset/T "
        "train_dataloader_shuffle/S",
    "rows of like length are padded together already": "group_by_length/ATS",
    "packing decides it":
        "pad_to_sequence_len/A eval_sample_packing/A pad_to_multiple_of/AT sample_packing_group_size/A "
        "sample_packing_bin_size/A sample_packing_eff_est/A multipack_real_batches/A packing_strategy/T "
        "eval_packing/T batch_flattening/A",
    "give global_batch_size (rows in one step over all processes) or per_device_train_batch_size": "batch_size/AG",
    "the backend chooses its attention; attn_implementation is for the transformers backend":
        "flash_attention/A flash_attn/L sdp_attention/A xformers_attention/A eager_attention/A flex_attention/A "
        "use_flash_attn/G s2_attention/A shift_attn/L flash_attn_cross_entropy/A flash_attn_rms_norm/A "
        "sdpa_varlen/A",
    "Unsloth's kernels are used where an accelerator is found":
        "plugins/A liger_rope/A liger_rms_norm/A liger_glu_activation/A liger_layer_norm/A "
        "liger_fused_linear_cross_entropy/A enable_liger_kernel/L cut_cross_entropy/A lora_mlp_kernel/A "
        "lora_qkv_kernel/A lora_o_kernel/A use_kernels/A chunked_cross_entropy/A use_unsloth_gc/L "
        "use_reentrant_gc/L activation_offloading/A",
    "the kit trains on text and on pairs of answers only":
        "trl/A reward_model/A task_type/S num_labels/A process_reward_model/A do_predict/L predict_with_generate/LS",
    "variants of LoRA other than use_rslora are not offered":
        "use_dora/LTS peft_use_dora/A pissa_init/L loftq_config/AG loraplus_lr_ratio/AL lorap_lr_ratio/S "
        "init_weights/S relora/A peft_layers_to_transform/A lora_bias/S freeze_trainable_layers/L "
        "unfrozen_parameters/A lora_fan_in_fan_out/A lora_on_cpu/A peft_init_lora_weights/A lora_rank_pattern/A "
        "lora_task_type/T",
    "the optimizers are those of Transformers; give optim":
        "use_galore/LS use_apollo/L use_badam/L use_adam_mini/L use_muon/L lisa_n_layers/A",
    "task cpo is DPO without a reference": "reference_free/G",
    "max_length counts for each answer with its prompt": "max_prompt_length/G max_completion_length/G",
    "video is not trained": "video_max_pixels/L",
    "the model's processor decides it; image_max_pixels bounds an image":
        "image_size/A image_resize_algorithm/A image_min_pixels/L image_do_pan_and_scan/L crop_to_patches/L "
        "min_pixels/S max_slice_nums/G",
    "method qlora quantizes with bitsandbytes to NF4, nested":
        "quantization_method/L quant_method/S double_quantization/L quantization_type/L bnb_4bit_quant_type/TS "
        "bnb_4bit_compute_dtype/S bnb_4bit_use_double_quant/S use_bnb_nested_quant/T bnb_config_kwargs/A gptq/A",
    "only data parallelism, ZeRO and FSDP2 are offered":
        "tensor_parallel_size/A context_parallel_size/A sequence_parallel_degree/A sequence_parallel_size/S "
        "expert_parallel_size/A use_mca/L use_megatron_bridge/L",
    "give overwrite to replace an earlier run of the same name": "overwrite_output_dir/LTG",
    "logs are written to the run's folder": "logging_dir/TSG",
    "a run continues only with the state of its optimizer; save_total_limit keeps fewer checkpoints":
        "save_only_model/ALTS",
    "early_stopping_patience stops by the evaluation loss": "loss_watchdog_threshold/A loss_watchdog_patience/A",
    "push_to_hub uploads once, when the run has ended": "hub_strategy/ATS hub_always_push/T",
    "give it as HF_TOKEN in the environment, or log in once (uv run hf auth login)":
        "hub_token/TSG hf_hub_token/L hf_use_auth_token/A",
    "the launcher and the devices decide it":
        "ddp_backend/S local_rank/TG world_size/A device_map/ALSG ddp/A device/AG max_memory/AS gpu_memory_limit/A "
        "n_gpu/G num_gpus/G",
    "the result is written to output_dir/run_name": "save_path/G",
    _EXPORT: "save_gguf/G push_gguf/G quantization/G",
    "give rows with a text column": "raw_text_file/G chunk_size/G stride/G",
    "every assistant turn of a chat is trained": "mask_history/L",
    "the loss is the negative log-likelihood of the supervised tokens": "label_smoothing_factor/T neat_loss/G",
    "models and datasets come from the Hugging Face Hub or a folder, and processes from the launcher":
        "use_hf/S use_ray/AS ray_num_workers/L",
}  # fmt: skip

# Option -> value elsewhere (in lower case) -> value here.
OTHER_VALUES: Mapping[str, Mapping[str, str]] = {
    "optim": {
        "adamw": "adamw_torch_fused", "adam": "adamw_torch_fused", "adamw_hf": "adamw_torch_fused",
        "adamw_apex_fused": "adamw_torch_fused", "adamw_fused": "adamw_torch_fused", "adam8bit": "adamw_8bit",
        "adamw8bit": "adamw_8bit", "8bit_adam": "adamw_8bit", "adam_8bit": "adamw_8bit",
        "paged_adamw": "paged_adamw_32bit", "lion": "lion_32bit", "sgd_momentum": "sgd",
    },
    "lr_scheduler_type": {
        "cosine_annealing": "cosine", "cosineannealinglr": "cosine", "warmuplr": "constant_with_warmup",
        "warmupdecaylr": "linear", "none": "constant", "linear_with_warmup": "linear", "cosine_with_warmup": "cosine",
    },
    "gradient_checkpointing": {
        "true": "auto", "false": "none", "full": "torch", "selective": "auto", "offload": "unsloth",
    },
    "precision": {
        "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "no": "fp32",
        "bf16-mixed": "bf16", "16-mixed": "fp16", "true": "bf16",
    },
    "full_weights": {"bfloat16": "bf16", "float32": "fp32"},
    "method": {"fft": "full", "full_finetuning": "full", "none": "full", "lora_4bit": "qlora"},
    "loss_on": {"completion": "assistant", "response": "assistant", "answer": "assistant", "prompt": "all"},
    "overlong": {"delete": "drop", "right": "truncate", "keep_start": "truncate"},
    "eval_strategy": {"none": "no"},
    "save_strategy": {"none": "no"},
}  # fmt: skip


def _read() -> dict[str, Alias]:
    table: dict[str, Alias] = {}

    def add(words: str, **meaning: Any) -> None:
        for word in words.split():
            name, tools = word.split("/")
            assert name not in table, name
            table[name] = Alias(tools, **meaning)

    for option, words in RENAMED.items():
        add(words, option=option)
    for words, (values, note) in VALUED.items():
        add(words, values=values, note=note)
    for note, words in WITHOUT.items():
        add(words, note=note)
    return table


ALIASES: Mapping[str, Alias] = _read()
