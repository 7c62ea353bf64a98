"""Fine-tune a model of transformers on a data set of `datasets`: classify sentences.

    python examples/complete/finetune_transformers.py
    unisono run -n 2 examples/complete/finetune_transformers.py

Nothing is downloaded: the model is a small BERT made from a configuration, with a tokenizer made
from the sentences themselves. `--model` takes a pretrained one, by its name on the Hugging Face Hub
(never tried) or from a folder. Needs `pip install '.[transformers]'` in a clone.
"""

import argparse

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader

import unisono

STARTS = ("the film", "this book", "her new album", "the second part", "their last play")
VERDICTS = {
    1: ("a joy", "moving and clever", "funny from start to end", "better than any other"),
    0: ("a bore", "loud and empty", "dull from start to end", "worse than any other"),
}


def sentences():
    """Make sentences that praise (1) or blame (0)."""
    rows = [
        {"text": f"{start} {link} {verdict}{end}", "label": label}
        for start in STARTS
        for link in ("is", "was", "seems to be", "turns out to be")
        for label, verdicts in VERDICTS.items()
        for verdict in verdicts
        for end in ("", " , they say", " and i have seen many")
    ]
    dataset = datasets.Dataset.from_list(rows)
    return dataset.train_test_split(test_size=0.2, seed=0)


def load(name, texts):
    """Load a model and its tokenizer, or make small ones."""
    if name is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
        model.train()  # `from_pretrained` leaves it in `eval()` mode
        return model, tokenizer
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    )
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=2,
    )
    return transformers.AutoModelForSequenceClassification.from_config(config), tokenizer


def loss(model, batch):
    output = model(**batch)  # transformers computes the mean loss, as there are labels
    accuracy = (output.logits.argmax(1) == batch["labels"]).float().mean()
    return {"loss": output.loss, "accuracy": accuracy}


def groups(model, weight_decay):
    """Decay matrices alone, as is usual with transformers."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", metavar="NAME", help="on the Hub, or a folder")
    parser.add_argument("--directory", help="for checkpoints; without it: none")
    parser.add_argument("--save", metavar="FOLDER", help="where model and tokenizer are saved")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="of all workers together")
    parser.add_argument("--lr", type=float, help="5e-5 with --model, else 2e-3")
    parser.add_argument("--quick", action="store_true", help="one epoch")
    args = parser.parse_args()
    if args.quick:
        args.epochs = 1
    if args.lr is None:
        args.lr = 2e-3 if args.model is None else 5e-5
    return args


def main():
    args = arguments()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    data = sentences()
    torch.manual_seed(0)
    model, tokenizer = load(args.model, data["train"]["text"])
    data = data.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns="text")

    optimizer = torch.optim.AdamW(groups(model, weight_decay=0.01), args.lr)
    num_steps = args.epochs * -(-len(data["train"]) // args.batch_size)
    rates = transformers.get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    trainer = unisono.Trainer(
        model,
        optimizer,
        loss,
        shards=4,
        seed=0,
        clip_norm=1.0,
        schedule=unisono.Schedule(rates, every="step"),
        directory=args.directory,
    )
    pad = transformers.DataCollatorWithPadding(tokenizer)  # within each shard
    loader = DataLoader(data["train"], args.batch_size, shuffle=True, collate_fn=pad)
    trainer.fit(loader, epochs=args.epochs, validate=data["test"])
    if unisono.world().rank == 0:
        if args.save:
            model.save_pretrained(args.save)
            tokenizer.save_pretrained(args.save)
            print(f"saved: load it with `from_pretrained({args.save!r})`")
        classify = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
        for text in ("the second part is a joy", "her new album seems to be loud and empty"):
            (said,) = classify(text)
            print(f"{text}: {said['label']}, {said['score']:.2%}")


if __name__ == "__main__":
    main()
