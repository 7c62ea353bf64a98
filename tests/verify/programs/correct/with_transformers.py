"""transformers' Trainer: a small GPT-2 from its configuration, accumulation, a schedule."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, 60, (length, 16), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main():
    set_seed(0)
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=12,
        eval_strategy="steps",
        eval_steps=6,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    trainer = Trainer(model, arguments, train_dataset=Tokens(64, 1), eval_dataset=Tokens(20, 2))
    trainer.train()


if __name__ == "__main__":
    main()
