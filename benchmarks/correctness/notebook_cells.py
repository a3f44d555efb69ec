"""Small notebooks of the kit for converted_notebooks.py: DPO, GRPO, and loops by hand, one with Accelerate.

They load random weights from local/llama, which that script makes, and need no network.
"""

LOAD = """\
from unsloth import FastLanguageModel
import torch
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "local/llama", max_seq_length = 512, load_in_4bit = False, dtype = torch.bfloat16,
)"""

# A cell of its own: Unsloth keeps the model's save_pretrained here, so saves are counted only from before.
ADAPTER = """\
model = FastLanguageModel.get_peft_model(
    model, r = 16, lora_alpha = 16, lora_dropout = 0, random_state = 3407,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)"""

SAVE = 'model.save_pretrained("lora_model")'

DPO = [
    LOAD.replace(
        "from unsloth import FastLanguageModel",
        "from unsloth import FastLanguageModel, PatchDPOTrainer\nPatchDPOTrainer()",
    ),
    ADAPTER,
    """\
from datasets import Dataset
dataset = Dataset.from_list([
    {"prompt": f"Add {i} and {i + 1}. ", "chosen": f"The sum is {2 * i + 1}.", "rejected": f"I do not know {i}."}
    for i in range(200)
])""",
    """\
from trl import DPOConfig, DPOTrainer
trainer = DPOTrainer(
    model = model, ref_model = None, train_dataset = dataset, processing_class = tokenizer,
    args = DPOConfig(
        per_device_train_batch_size = 2, gradient_accumulation_steps = 4, max_steps = 12, learning_rate = 5e-3,
        logging_steps = 1, seed = 3407, output_dir = "outputs", report_to = "none", max_length = 128, bf16 = True,
    ),
)
trainer.train()""",
    SAVE,
]

GRPO = [
    LOAD,
    ADAPTER,
    """\
from datasets import Dataset
dataset = Dataset.from_list([{"prompt": f"Add {i} and {i + 1}. "} for i in range(200)])

def short(completions, **kwargs):
    return [-float(len(text)) / 100 for text in completions]""",
    """\
from trl import GRPOConfig, GRPOTrainer
trainer = GRPOTrainer(
    model = model, processing_class = tokenizer, reward_funcs = [short], train_dataset = dataset,
    args = GRPOConfig(
        per_device_train_batch_size = 4, gradient_accumulation_steps = 2, num_generations = 4, max_steps = 6,
        max_completion_length = 32, learning_rate = 1e-4, logging_steps = 1, seed = 3407, output_dir = "outputs",
        report_to = "none", bf16 = True,
    ),
)
trainer.train()""",
    SAVE,
]

ROWS = """\
from torch.utils.data import DataLoader
rows = [tokenizer(f"Add {i} and {i + 1}. The sum is {2 * i + 1}.")["input_ids"] for i in range(96)]

def collate(batch):
    width = max(len(row) for row in batch)
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in batch])
    return {"input_ids": ids, "labels": ids.masked_fill(ids == tokenizer.pad_token_id, -100)}

loader = DataLoader(rows, batch_size = 8, collate_fn = collate)"""

LOOP = [
    LOAD,
    ADAPTER,
    ROWS,
    """\
from accelerate import Accelerator
accelerator = Accelerator()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr = 5e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)""",
    """\
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print({"loss": accelerator.gather(loss.detach()[None]).mean().item()})""",
    'accelerator.unwrap_model(model).save_pretrained("lora_model")',
]

PLAIN_LOOP = [
    LOAD,
    ADAPTER,
    ROWS,
    """\
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr = 5e-3)
for batch in loader:
    loss = model(**{name: part.to("cuda") for name, part in batch.items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print({"loss": loss.item()})""",
    SAVE,
]

NOTEBOOKS = {"dpo": DPO, "grpo": GRPO, "loop": LOOP, "plain_loop": PLAIN_LOOP}
