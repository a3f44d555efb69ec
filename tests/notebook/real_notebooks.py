"""Small notebooks that train for real on a CPU within a second or two: one of each kind that people write.

They make their models, tokenizers and rows themselves. DRAWN are those in which several processes cannot end with the
notebook's weights: something is drawn for each row, or a loss takes the rows of a batch together.
"""

CLASSIFIER = """\
import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
torch.manual_seed(0)
config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
model = BertForSequenceClassification(config)
rows = Dataset.from_list([{"input_ids": [i % 50, 1 + i % 7, 2, 3], "labels": i % 2} for i in range(24)])
plain = dict(report_to="none", use_cpu=True, save_strategy="no", logging_steps=1)
"""
LANGUAGE_MODEL = """\
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnop"]
made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                                     num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1))
texts = ["a b c d e", "f g h", "b a c e", "p o n m l k", "d d e", "a p", "h g f e", "c b"]
"""
LOOP = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
inputs = torch.randn(24, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True,
                    generator=torch.Generator().manual_seed(5))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
"""
PAIRS = """\
class Pairs(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **rest):
        labels = inputs.pop("labels")
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-1][:, 0]
        near = torch.nn.functional.normalize(hidden, dim=-1)
        same = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        return ((near @ near.T - same) ** 2).mean()
"""
NOTEBOOKS: dict[str, tuple[str, ...]] = {
    "trainer": (
        CLASSIFIER,
        "args = TrainingArguments('o', per_device_train_batch_size=4, num_train_epochs=1, **plain)",
        "trainer = Trainer(model=model, args=args, train_dataset=rows)\ntrainer.train()\ntrainer.save_model('saved')",
    ),
    "accumulates": (
        CLASSIFIER,
        "trainer = Trainer(model=model, train_dataset=rows, args=TrainingArguments(\n    output_dir='o',\n"
        "    per_device_train_batch_size=2, # rows\n    gradient_accumulation_steps=3,\n    num_train_epochs=2,\n"
        "    weight_decay=0.1, warmup_steps=2, learning_rate=1e-2, report_to='none', use_cpu=True, "
        "save_strategy='no'))\n"
        "trainer.train()",
    ),
    "default_batch": (
        CLASSIFIER,
        "trainer = Trainer(model=model, args=TrainingArguments(output_dir='o', report_to='none', use_cpu=True,\n"
        "    save_strategy='no', num_train_epochs=1), train_dataset=rows)\ntrainer.train()",
    ),
    "unused_weights": (
        CLASSIFIER,
        "class Head(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.body, self.top = model.bert, torch.nn.Linear(16, 2)\n"
        "    def forward(self, input_ids=None, labels=None, **rest):\n"
        "        logits = self.top(self.body(input_ids).last_hidden_state[:, 0])\n"
        "        return {'loss': torch.nn.functional.cross_entropy(logits, labels), 'logits': logits}",
        "args = TrainingArguments('o', per_device_train_batch_size=4, num_train_epochs=1, **plain)\n"
        "Trainer(model=Head(), args=args, train_dataset=rows).train()",
    ),
    "layer_drop": (
        "import torch\nfrom datasets import Dataset\n"
        "from transformers import Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2ForSequenceClassification\n"
        "torch.manual_seed(0)\nmodel = Wav2Vec2ForSequenceClassification(Wav2Vec2Config(hidden_size=16, "
        "num_hidden_layers=2,\n"
        "    num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),\n"
        "    num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.7, classifier_proj_size=8,\n"
        "    mask_time_prob=0.0, mask_feature_prob=0.0))",
        "rows = Dataset.from_list([{'input_values': [0.01 * i] * 200, 'labels': i % 2} for i in range(16)])\n"
        "args = TrainingArguments(output_dir='o', per_device_train_batch_size=4, num_train_epochs=2, "
        "report_to='none',\n"
        "    use_cpu=True, save_strategy='no')\nTrainer(model=model, args=args, train_dataset=rows).train()",
    ),
    "compares_rows": (
        CLASSIFIER,
        PAIRS,
        "args = TrainingArguments('o', per_device_train_batch_size=8, num_train_epochs=1, **plain)\n"
        "Pairs(model=model, args=args, train_dataset=rows).train()",
    ),
    "batch_norm": (
        CLASSIFIER,
        "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.body, self.norm, self.top = torch.nn.Embedding(50, 8), torch.nn.BatchNorm1d(8), "
        "torch.nn.Linear(8, 2)\n"
        "    def forward(self, input_ids=None, labels=None):\n"
        "        logits = self.top(self.norm(self.body(input_ids).mean(dim=1)))\n"
        "        return {'loss': torch.nn.functional.cross_entropy(logits, labels), 'logits': logits}",
        "args = TrainingArguments('o', per_device_train_batch_size=8, num_train_epochs=2, **plain)\n"
        "Trainer(model=Net(), args=args, train_dataset=rows).train()",
    ),
    "own_loss": (
        CLASSIFIER,
        "class Weighted(Trainer):\n    def compute_loss(self, model, inputs, return_outputs=False, **rest):\n"
        "        labels = inputs.pop('labels')\n        outputs = model(**inputs)\n"
        "        loss = (torch.nn.functional.cross_entropy(outputs.logits, labels, reduction='none') * 2).mean()\n"
        "        return (loss, outputs) if return_outputs else loss",
        "args = TrainingArguments('o', per_device_train_batch_size=4, num_train_epochs=1, **plain)\n"
        "trainer = Weighted(model=model, args=args, train_dataset=rows, eval_dataset=rows)\n"
        "trainer.train()\nprint(trainer.evaluate())",
    ),
    "best_checkpoint": (
        CLASSIFIER,
        "args = TrainingArguments('o', per_device_train_batch_size=4, num_train_epochs=2, eval_strategy='epoch',\n"
        "    save_strategy='epoch', load_best_model_at_end=True, save_total_limit=1, report_to='none', use_cpu=True)\n"
        "trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)\ntrainer.train()",
    ),
    "arguments_from_a_dict": (
        CLASSIFIER,
        "settings = {**plain, 'output_dir': 'o', 'per_device_train_batch_size': 6, 'max_steps': 3}\n"
        "trainer = Trainer(model=model, args=TrainingArguments(**settings), train_dataset=rows)\ntrainer.train()",
    ),
    "arguments_from_a_parser": (
        CLASSIFIER,
        "from transformers import HfArgumentParser\nwords = ['--output_dir', 'o', '--per_device_train_batch_size', "
        "'4',\n"
        "         '--max_steps', '3', '--report_to', 'none', '--use_cpu', 'True', '--save_strategy', 'no']\n"
        "(given,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses(words)",
        "Trainer(model=model, args=given, train_dataset=rows).train()",
    ),
    "stops_itself": (
        CLASSIFIER,
        "from transformers import TrainerCallback\nclass Stops(TrainerCallback):\n"
        "    def on_step_end(self, args, state, control, **rest):\n        if state.global_step >= 2:\n"
        "            control.should_training_stop = True",
        "args = TrainingArguments('o', per_device_train_batch_size=4, num_train_epochs=3, **plain)\n"
        "Trainer(model=model, args=args, train_dataset=rows, callbacks=[Stops()]).train()",
    ),
    "entries_read_later": (
        CLASSIFIER,
        "results = {}\ndef summarize(model, label):\n    count = sum(p.numel() for p in model.parameters())\n"
        "    print(label, count)\n    return {'weights': count}\nresults['before'] = summarize(model, 'before')",
        "args = TrainingArguments('o', per_device_train_batch_size=4, max_steps=2, **plain)\n"
        "trainer = Trainer(model=model, args=args, train_dataset=rows)\ndone = trainer.train()\n"
        "results['before'].update(loss=done.training_loss)\nresults['after'] = summarize(trainer.model, 'after')\n"
        "trainer.log({'weights': results['after']['weights']})\ntrainer.save_model('saved')\nprint(results)",
    ),
    "saves_in_a_loop": (
        CLASSIFIER,
        "import csv, json, os\ndef size(path):\n    return os.path.getsize(os.path.join(path, 'config.json'))\n"
        "history = []",
        "for rate in (1e-2, 1e-3):\n"
        "    args = TrainingArguments('o', per_device_train_batch_size=4, learning_rate=rate, max_steps=2, **plain)\n"
        "    trainer = Trainer(model=model, args=args, train_dataset=rows)\n    done = trainer.train()\n"
        "    folder = f'model_{rate}'\n    model.save_pretrained(folder)\n    history.append([rate, size(folder)])\n"
        "    with open('history.json', 'w') as file:\n        json.dump(history, file)\n    total = 0\n"
        "    with open('table.csv', 'w', newline='') as file:\n        writer = csv.writer(file)\n"
        "        for row in history:\n            total += 1\n            writer.writerow(row)\n    print(total)",
        "print(open('history.json').read(), open('table.csv').read())",
    ),
    "seq2seq": (
        "import torch\nfrom datasets import Dataset\n"
        "from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration\n"
        "torch.manual_seed(0)\nmodel = T5ForConditionalGeneration(T5Config(vocab_size=30, d_model=16, d_kv=8, "
        "d_ff=16,\n"
        "    num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0))",
        "rows = Dataset.from_list([{'input_ids': [1 + i % 20, 2, 3], 'labels': [4, 5 + i % 9]} for i in range(16)])\n"
        "args = Seq2SeqTrainingArguments('o', per_device_train_batch_size=8, num_train_epochs=2, report_to='none',\n"
        "    use_cpu=True, save_strategy='no')\nSeq2SeqTrainer(model=model, args=args, train_dataset=rows).train()",
    ),
    "masked": (
        LANGUAGE_MODEL,
        "from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, Trainer, "
        "TrainingArguments\n"
        "tokenizer.add_special_tokens({'mask_token': '<mask>'})\nmasked = BertForMaskedLM(BertConfig(vocab_size=30,\n"
        "    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))\n"
        "rows = Dataset.from_dict({'input_ids': [[3, 4, 5, 6, 7, 8]] * 16})",
        "args = TrainingArguments('o', per_device_train_batch_size=8, max_steps=2, report_to='none', use_cpu=True,\n"
        "    save_strategy='no')\nTrainer(model=masked, args=args, train_dataset=rows,\n"
        "    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)).train()",
    ),
    "loop": (
        LOOP,
        "for epoch in range(2):\n    for x, y in loader:\n        loss = ((model(x) - y) ** 2).mean()\n"
        "        loss.backward()\n        optimizer.step()\n        optimizer.zero_grad()\n    print(epoch)",
        "torch.save(model.state_dict(), 'model.pt')",
    ),
    "loop_in_a_function": (
        LOOP,
        "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)\ndef fit(net, batches, opt):\n    net.train()\n"
        "    for x, y in batches:\n        opt.zero_grad()\n        loss = torch.nn.functional.mse_loss(net(x), y)\n"
        "        loss.backward()\n        opt.step()\n        schedule.step()\n    torch.save(net.state_dict(), "
        "'model.pt')\n"
        "    net.load_state_dict(torch.load('model.pt'))\nfit(model, loader, optimizer)",
    ),
    "accelerate": (
        LOOP,
        "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\nfor x, y in loader:\n"
        "    loss = ((model(x) - y) ** 2).mean()\n    accelerator.backward(loss)\n    optimizer.step()\n"
        "    optimizer.zero_grad()",
    ),
}
# Those of TRL need Triton, which on a CPU has to be told before it is imported.
OF_TRL: dict[str, tuple[str, ...]] = {
    "sft": (
        LANGUAGE_MODEL,
        "from trl import SFTConfig, SFTTrainer\n"
        "args = SFTConfig('o', per_device_train_batch_size=4, num_train_epochs=2, report_to='none', use_cpu=True, "
        "bf16=False,\n"
        "    save_strategy='no', logging_steps=1, learning_rate=1e-2)\n"
        "trainer = SFTTrainer(model=model, args=args, processing_class=tokenizer,\n"
        "    train_dataset=Dataset.from_dict({'text': texts}))\ntrainer.train()",
    ),
    "sft_lora": (
        LANGUAGE_MODEL,
        "from peft import LoraConfig\nfrom trl import SFTConfig, SFTTrainer\n"
        "args = SFTConfig('o', per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, "
        "report_to='none',\n"
        "    use_cpu=True, bf16=False, save_strategy='no', learning_rate=1e-2, gradient_checkpointing=True)\n"
        "trainer = SFTTrainer(model=model, args=args, processing_class=tokenizer,\n"
        "    train_dataset=Dataset.from_dict({'text': texts}),\n"
        "    peft_config=LoraConfig(r=2, lora_dropout=0.0, target_modules=['q_proj', 'v_proj'], "
        "task_type='CAUSAL_LM'))\n"
        "trainer.train()\ntrainer.save_model('lora')",
    ),
    "dpo": (
        LANGUAGE_MODEL,
        "from trl import DPOConfig, DPOTrainer\n"
        "pairs = [{'prompt': t, 'chosen': ' a b', 'rejected': ' p o n'} for t in texts]\n"
        "args = DPOConfig('o', per_device_train_batch_size=4, max_steps=2, report_to='none', use_cpu=True, "
        "bf16=False,\n"
        "    save_strategy='no', learning_rate=1e-2)\n"
        "from peft import LoraConfig\ntrainer = DPOTrainer(model=model, args=args, processing_class=tokenizer,\n"
        "    train_dataset=Dataset.from_list(pairs), peft_config=LoraConfig(r=2, task_type='CAUSAL_LM', "
        "lora_dropout=0.0,\n"
        "    target_modules=['q_proj', 'v_proj']))\ntrainer.train()",
    ),
}
DRAWN = {"layer_drop", "compares_rows", "batch_norm", "masked"}
# Transformers multiplies the loss by the number of processes where a model's own loss does not ask for the number of
# labels in a batch, as BERT's; AdamW takes no notice of it, but for weight decay, small gradients and clipping.
SCALED = {"accumulates", "saves_in_a_loop"}
