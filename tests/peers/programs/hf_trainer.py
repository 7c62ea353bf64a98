"""transformers' Trainer: a small GPT-2 from its configuration, made-up tokens, in a folder."""

import hashlib
import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)


class Tokens(torch.utils.data.Dataset):
    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, 60, (length, 16), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=6,
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=3,
    save_steps=3,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
config = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
trainer = Trainer(model, arguments, train_dataset=Tokens(64, 1), eval_dataset=Tokens(21, 2))
trainer.train()
loss = trainer.evaluate()["eval_loss"]
bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("rank", dist.get_rank(), "of", dist.get_backend(), loss, hashlib.sha256(bits).hexdigest())
